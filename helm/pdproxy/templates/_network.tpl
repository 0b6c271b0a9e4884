{{- define "pdproxy.dns" -}}
- ports: [{ protocol: UDP, port: 53 }, { protocol: TCP, port: 53 }]
{{- end -}}

{{/* What prefill and decode nodes say to each other. */}}
{{- define "pdproxy.transferPorts" -}}
- { protocol: TCP, port: {{ .transfer.sideChannelPort }} }
- { protocol: TCP, port: {{ .transfer.ucxPorts.first }}, endPort: {{ .transfer.ucxPorts.last }} }
{{- end -}}

{{/* What the machines of one node say to each other: anything but HTTP. */}}
{{- define "pdproxy.groupPorts" -}}
- { protocol: TCP, port: 1, endPort: {{ sub (int .nodes.httpPort) 1 }} }
- { protocol: TCP, port: {{ add (int .nodes.httpPort) 1 }}, endPort: 65535 }
{{- end -}}
