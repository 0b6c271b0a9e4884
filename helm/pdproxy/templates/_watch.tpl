{{/* How Prometheus scrapes a node. Takes (dict "root" $ "role" what the label `role` is made of). */}}
{{- define "pdproxy.nodeEndpoint" -}}
{{- $v := .root.Values -}}
- port: http
  path: /metrics
  interval: {{ $v.metrics.podMonitor.interval }}
  {{- if $v.nodes.tls.enabled }}
  scheme: https
  tlsConfig:
    ca: { secret: { name: {{ $v.nodes.tls.secret | quote }}, key: ca.crt } }
    serverName: {{ include "pdproxy.tls.serverName" .root | quote }}
  {{- end }}
  relabelings:
    - { targetLabel: job, replacement: vllm }
    - { targetLabel: release, replacement: {{ .root.Release.Name | quote }} }
    - { targetLabel: role, {{ .role }} }
    # The name that the proxy gives to nodes that it discovers by their addresses.
    - targetLabel: node
      sourceLabels: [__meta_kubernetes_pod_label_app_kubernetes_io_component, __address__]
      separator: "-"
{{- end -}}
