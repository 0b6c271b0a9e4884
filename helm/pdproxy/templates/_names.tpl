{{- define "pdproxy.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $both := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- .Values.fullnameOverride | default $both | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* What selects a component's pods; never changes. Takes (dict "root" $ "component" …). */}}
{{- define "pdproxy.selector" -}}
app.kubernetes.io/name: {{ .root.Values.nameOverride | default .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "pdproxy.labels" -}}
{{ include "pdproxy.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: pdproxy
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Takes (dict "root" $ "of" "proxy"|"node"). */}}
{{- define "pdproxy.image" -}}
{{- $image := get .root.Values.image .of -}}
{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{/* The workload of a role, also the governing service of its pods. */}}
{{- define "pdproxy.workload" -}}
{{ include "pdproxy.fullname" .root }}-{{ .component }}
{{- end -}}

{{/* The headless service with the HTTP servers of a role. A LeaderWorkerSet makes a service of its own name for all its
     pods, of which only the leaders serve. */}}
{{- define "pdproxy.headless" -}}
{{- $many := gt (int (get .root.Values .component).hosts) 1 -}}
{{ include "pdproxy.workload" . }}{{ if $many }}-leaders{{ end }}
{{- end -}}

{{- define "pdproxy.kind" -}}
{{ ternary "LeaderWorkerSet" "StatefulSet" (gt (int .hosts) 1) }}
{{- end -}}

{{- define "pdproxy.apiVersion" -}}
{{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (gt (int .hosts) 1) }}
{{- end -}}
