{{/* The series of a role's legs in flight, over all proxies. Takes (dict "root" $ "component" …). */}}
{{- define "pdproxy.inFlight" -}}
{{- $admin := printf "%s-admin" (include "pdproxy.fullname" .root) -}}
{{- $own := printf "namespace=%q,service=%q" .root.Release.Namespace $admin -}}
sum(pdproxy_node_active{role={{ .component | quote }},{{ .root.Values.keda.matchers | default $own }}})
{{- end -}}

{{- define "pdproxy.scaleDown" -}}
scaleDown:
  stabilizationWindowSeconds: {{ .autoscaling.scaleDownSeconds }}
  policies:
    - { type: Pods, value: 1, periodSeconds: 120 }
{{- end -}}
