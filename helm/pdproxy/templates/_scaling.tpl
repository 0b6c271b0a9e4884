{{/* What a role is scaled by, as a JSON list: series, their own labels, and how much of each a node may have; whichever asks
     for most nodes wins. Prefill nodes go by the tokens of prompts, decode nodes by streams, nodes that do both by both; and
     with autoscaling.advice by what the last hour needed, which for nodes that do both is the sum over the roles. Takes (dict "root" $ "component" …). */}}
{{- define "pdproxy.loads" -}}
{{- $autoscaling := (get .root.Values .component).autoscaling -}}
{{- $role := ternary dict (dict "role" .component) (eq .component "node") -}}
{{- $loads := list -}}
{{- if ne .component "decode" -}}
{{- $loads = append $loads (dict "series" "pdproxy_prefill_pending_tokens_estimate" "labels" dict "each" $autoscaling.promptTokensPerReplica) -}}
{{- end -}}
{{- if ne .component "prefill" -}}
{{- $loads = append $loads (dict "series" "pdproxy_node_active" "labels" (dict "role" "decode") "each" $autoscaling.streamsPerReplica) -}}
{{- end -}}
{{- if $autoscaling.advice -}}
{{- $loads = append $loads (dict "series" "pdproxy_nodes_needed" "labels" $role "each" 1) -}}
{{- end -}}
{{- $loads | toJson -}}
{{- end -}}

{{/* The sum of a series over all proxies. Takes (dict "root" $ "load" …). */}}
{{- define "pdproxy.loadQuery" -}}
{{- $admin := printf "%s-admin" (include "pdproxy.proxyName" .root) -}}
{{- $matchers := list (.root.Values.keda.matchers | default (printf "namespace=%q,service=%q" .root.Release.Namespace $admin)) -}}
{{- range $name, $value := .load.labels -}}{{- $matchers = prepend $matchers (printf "%s=%q" $name $value) -}}{{- end -}}
sum({{ .load.series }}{ {{- $matchers | join "," -}} })
{{- end -}}

{{- define "pdproxy.scaleDown" -}}
scaleDown:
  stabilizationWindowSeconds: {{ .autoscaling.scaleDownSeconds }}
  policies:
    - { type: Pods, value: 1, periodSeconds: 120 }
{{- end -}}
