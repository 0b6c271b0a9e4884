{{- define "pdproxy.dns" -}}
- ports: [{ protocol: UDP, port: 53 }, { protocol: TCP, port: 53 }]
{{- end -}}

{{/* What prefill and decode nodes say to each other. */}}
{{- define "pdproxy.transferPorts" -}}
- { protocol: TCP, port: {{ .transfer.sideChannelPort }} }
- { protocol: TCP, port: {{ .transfer.ucxPorts.first }}, endPort: {{ .transfer.ucxPorts.last }} }
{{- end -}}

{{/* What the proxy asks of nodes, and hears from them. Takes the values. */}}
{{- define "pdproxy.proxyPorts" -}}
- { protocol: TCP, port: {{ .nodes.httpPort }} }
{{- if .kvEvents.enabled }}
- { protocol: TCP, port: {{ .kvEvents.port }}, endPort: {{ add (int .kvEvents.port) 15 }} }
- { protocol: TCP, port: {{ .kvEvents.replayPort }}, endPort: {{ add (int .kvEvents.replayPort) 15 }} }
{{- end }}
{{- end -}}

{{/* What the machines of one node say to each other: anything but HTTP. */}}
{{- define "pdproxy.groupPorts" -}}
- { protocol: TCP, port: 1, endPort: {{ sub (int .nodes.httpPort) 1 }} }
- { protocol: TCP, port: {{ add (int .nodes.httpPort) 1 }}, endPort: 65535 }
{{- end -}}
