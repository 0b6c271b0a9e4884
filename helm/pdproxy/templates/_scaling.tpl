{{/* What a role is scaled by, as JSON: the series, its own labels, and how much of it a node may have. Prefill nodes go by
     the tokens of prompts, decode nodes by streams. Takes (dict "root" $ "component" …). */}}
{{- define "pdproxy.load" -}}
{{- $autoscaling := (get .root.Values .component).autoscaling -}}
{{- if eq .component "prefill" -}}
{{- dict "series" "pdproxy_prefill_pending_tokens_estimate" "labels" dict "each" $autoscaling.promptTokensPerReplica | toJson -}}
{{- else -}}
{{- dict "series" "pdproxy_node_active" "labels" (dict "role" .component) "each" $autoscaling.streamsPerReplica | toJson -}}
{{- end -}}
{{- end -}}

{{/* The sum of that series over all proxies. Takes (dict "root" $ "component" …). */}}
{{- define "pdproxy.loadQuery" -}}
{{- $load := include "pdproxy.load" . | fromJson -}}
{{- $admin := printf "%s-admin" (include "pdproxy.proxyName" .root) -}}
{{- $matchers := list (.root.Values.keda.matchers | default (printf "namespace=%q,service=%q" .root.Release.Namespace $admin)) -}}
{{- range $name, $value := $load.labels -}}{{- $matchers = prepend $matchers (printf "%s=%q" $name $value) -}}{{- end -}}
sum({{ $load.series }}{ {{- $matchers | join "," -}} })
{{- end -}}

{{- define "pdproxy.scaleDown" -}}
scaleDown:
  stabilizationWindowSeconds: {{ .autoscaling.scaleDownSeconds }}
  policies:
    - { type: Pods, value: 1, periodSeconds: 120 }
{{- end -}}
