{{- define "pdproxy.dns" -}}
- ports:
    {{- range $port := .Values.networkPolicy.dnsPorts }}
    - { protocol: UDP, port: {{ $port }} }
    - { protocol: TCP, port: {{ $port }} }
    {{- end }}
{{- end -}}

{{/* As many ports from one on as there are data-parallel ranks. Takes (dict "values" … "first" …). */}}
{{- define "pdproxy.rankPorts" -}}
- { protocol: TCP, port: {{ int .first }}, endPort: {{ add (int .first) (int (include "pdproxy.ranks" .values)) -1 }} }
{{- end -}}

{{/* The kinds of nodes that a node of this kind exchanges tickets with, as a YAML list. Takes (dict "root" $ "component" …). */}}
{{- define "pdproxy.partners" -}}
{{ ternary .root.Values.nodes.kinds (without .root.Values.nodes.kinds .component) (eq .component "node") | toJson }}
{{- end -}}

{{/* What nodes that exchange tickets say to each other. */}}
{{- define "pdproxy.transferPorts" -}}
{{ include "pdproxy.rankPorts" (dict "values" . "first" .transfer.sideChannelPort) }}
- { protocol: TCP, port: {{ .transfer.ucxPorts.first }}, endPort: {{ .transfer.ucxPorts.last }} }
{{- end -}}

{{/* What the proxy asks of nodes, and hears from them. Takes the values. */}}
{{- define "pdproxy.proxyPorts" -}}
- { protocol: TCP, port: {{ .nodes.httpPort }} }
{{- if and .kvEvents.enabled .ipv6 }}
# Which of Linux's own ports publishers get is left to the system.
- { protocol: TCP, port: 32768, endPort: 60999 }
{{- else if .kvEvents.enabled }}
{{ include "pdproxy.rankPorts" (dict "values" . "first" .kvEvents.port) }}
{{ include "pdproxy.rankPorts" (dict "values" . "first" .kvEvents.replayPort) }}
{{- end }}
{{- end -}}

{{/* What the machines of one node say to each other: anything but HTTP. */}}
{{- define "pdproxy.groupPorts" -}}
{{- if gt (int .nodes.httpPort) 1 }}
- { protocol: TCP, port: 1, endPort: {{ sub (int .nodes.httpPort) 1 }} }
{{- end }}
{{- if lt (int .nodes.httpPort) 65535 }}
- { protocol: TCP, port: {{ add (int .nodes.httpPort) 1 }}, endPort: 65535 }
{{- end }}
{{- end -}}
