{{/* A secret's entry, base64: what the cluster has, else what is given as new. Takes (dict "root" "secret" "key" "new").
     `lookup` finds nothing where there is no cluster (helm template): then it is new each time. */}}
{{- define "pdproxy.kept" -}}
{{- $there := lookup "v1" "Secret" .root.Release.Namespace .secret | default dict -}}
{{- get (get $there "data" | default dict) .key | default (b64enc .new) -}}
{{- end -}}

{{- define "pdproxy.secret.apiKeys" -}}
{{ .Values.apiKeys.existingSecret | default (printf "%s-api-keys" (include "pdproxy.proxyName" .)) }}
{{- end -}}

{{- define "pdproxy.secret.access" -}}
{{ .Values.access.existingSecret | default (printf "%s-access" (include "pdproxy.proxyName" .)) }}
{{- end -}}

{{- define "pdproxy.secret.tickets" -}}
{{ .Values.tickets.existingSecret | default (printf "%s-tickets" (include "pdproxy.proxyName" .)) }}
{{- end -}}
