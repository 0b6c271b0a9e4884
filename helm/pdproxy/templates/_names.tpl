{{- define "pdproxy.fullname" -}}
{{- $name := .Values.nameOverride | default .Chart.Name -}}
{{- $both := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- .Values.fullnameOverride | default $both | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* What selects a component's pods; never changes. Takes (dict "root" $ "component" …). */}}
{{- define "pdproxy.selector" -}}
app.kubernetes.io/name: {{ .root.Values.nameOverride | default .root.Chart.Name | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Of an object. Takes (dict "root" $ "component" …). */}}
{{- define "pdproxy.labels" -}}
{{- $labels := dict
      "app.kubernetes.io/part-of" "pdproxy"
      "app.kubernetes.io/managed-by" .root.Release.Service
      "app.kubernetes.io/version" .root.Chart.AppVersion
      "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- mergeOverwrite $labels .root.Values.commonLabels (include "pdproxy.selector" . | fromYaml) | toYaml -}}
{{- end -}}

{{/* Of the pods in a workload: nothing that another version of the chart would change, for that restarts them all.
     Takes (dict "root" $ "component" …) and the operator's own under "more". */}}
{{- define "pdproxy.podLabels" -}}
{{- $labels := dict "app.kubernetes.io/part-of" "pdproxy" "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- mergeOverwrite $labels .root.Values.commonLabels .more (include "pdproxy.setLabel" .root | fromYaml) (include "pdproxy.selector" . | fromYaml) | toYaml -}}
{{- end -}}

{{/* A container's variables, each name once: the operator's replace the chart's. A variable of the chart that refers to a
     replaced one comes after it, for Kubernetes fills in only what stands before. Takes (dict "own" LIST "extra" LIST). */}}
{{- define "pdproxy.env" -}}
{{- $theirs := list -}}
{{- range .extra -}}{{- $theirs = append $theirs .name -}}{{- end -}}
{{- $before := list -}}
{{- $after := list -}}
{{- range $own := .own -}}
  {{- $refers := false -}}
  {{- range $theirs -}}{{- $refers = or $refers (contains (printf "$(%s)" .) ($own.value | default "")) -}}{{- end -}}
  {{- if has $own.name $theirs -}}
  {{- else if $refers -}}{{- $after = append $after $own -}}
  {{- else -}}{{- $before = append $before $own -}}{{- end -}}
{{- end -}}
{{- concat $before .extra $after | toYaml -}}
{{- end -}}

{{/* The block size that is said to a role's nodes, by the last argument that says one; 0 where vLLM chooses.
     Takes (dict "root" $ "component" …). */}}
{{- define "pdproxy.blockSize" -}}
{{- $words := concat .root.Values.model.extraArgs (get .root.Values .component).extraArgs | join " " -}}
{{- $said := regexFindAll "--block[-_]size[= ][0-9]+" $words -1 -}}
{{- if $said }}{{ last $said | regexFind "[0-9]+$" }}{{ else }}{{ int .root.Values.model.blockSize }}{{ end -}}
{{- end -}}

{{/* Nodes of a kind, in a sentence. Takes the kind. */}}
{{- define "pdproxy.nodesOf" -}}
{{ ternary "nodes that do both" (printf "%s nodes" .) (eq . "node") }}
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
     pods, ready or not. */}}
{{- define "pdproxy.headless" -}}
{{- $r := get .root.Values .component -}}
{{ include "pdproxy.workload" . }}{{ if gt (int $r.hosts) 1 }}{{ ternary "-hosts" "-leaders" (gt (int $r.parallel.data) 1) }}{{ end }}
{{- end -}}

{{/* The most data-parallel ranks that an engine of any kind has: so many ports in a row are theirs. Takes the values. */}}
{{- define "pdproxy.ranks" -}}
{{- $most := 1 -}}
{{- range $kind := .nodes.kinds -}}{{- $most = max $most (int (get $ $kind).parallel.data) -}}{{- end -}}
{{ $most }}
{{- end -}}

{{/* Takes (dict "root" $ "component" …). */}}
{{- define "pdproxy.kind" -}}
{{- $one := ternary "Deployment" "StatefulSet" (eq .root.Values.nodes.upgrade.strategy "surge") -}}
{{ ternary "LeaderWorkerSet" $one (gt (int (get .root.Values .component).hosts) 1) }}
{{- end -}}

{{- define "pdproxy.apiVersion" -}}
{{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (gt (int .hosts) 1) }}
{{- end -}}
