{{/* What nodes find on disk beside weights: compiled kernels, certificates; and how they wait for weights that a Job fetches. */}}

{{/* A volume of a node for what is compiled. Takes the values. */}}
{{- define "pdproxy.compileCache.volume" -}}
{{- with .nodes.compileCache -}}
{{- if eq .kind "emptyDir" -}}
- name: compile-cache
  emptyDir: {}
{{- else if eq .kind "hostPath" -}}
- name: compile-cache
  hostPath: { path: {{ .hostPath | quote }}, type: DirectoryOrCreate }
{{- else if eq .kind "existingClaim" -}}
- name: compile-cache
  persistentVolumeClaim: { claimName: {{ .existingClaim | quote }} }
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The variables that bring each compiler there. Takes the values. */}}
{{- define "pdproxy.compileCache.env" -}}
{{- $path := .nodes.compileCache.mountPath -}}
{{- $names := dict "VLLM_CACHE_ROOT" "vllm" "FLASHINFER_WORKSPACE_BASE" "flashinfer" "TRITON_CACHE_DIR" "triton" "TORCHINDUCTOR_CACHE_DIR" "inductor" "DG_JIT_CACHE_DIR" "deep_gemm" -}}
{{- range $name, $folder := $names }}
- name: {{ $name }}
  value: {{ printf "%s/%s" $path $folder | quote }}
{{- end -}}
{{- end -}}

{{/* The name that nodes' certificates must hold. */}}
{{- define "pdproxy.tls.serverName" -}}
{{ .Values.nodes.tls.serverName | default (printf "%s-nodes" (include "pdproxy.fullname" .)) }}
{{- end -}}

{{- define "pdproxy.scheme" -}}
{{ ternary "https" "http" .Values.nodes.tls.enabled }}
{{- end -}}

{{- define "pdproxy.listenAddress" -}}
{{ .Values.proxy.listenAddress | default (ternary "::" "0.0.0.0" .Values.ipv6) }}
{{- end -}}

{{/* The Job that fetches weights: another one for other weights, since Jobs do not change. */}}
{{- define "pdproxy.download.name" -}}
{{- $of := list .Values.model.name .Values.model.revision (include "pdproxy.image" (dict "root" . "of" "node")) (toJson .Values.model.storage) (toJson .Values.model.download) -}}
{{ include "pdproxy.fullname" . }}-download-{{ $of | toJson | sha256sum | trunc 10 }}
{{- end -}}

{{/* The variables of the Job and of those that wait for it. */}}
{{- define "pdproxy.download.env" -}}
{{- $v := .Values -}}
- name: HF_HOME
  value: {{ $v.model.storage.mountPath | quote }}
- name: MODEL
  value: {{ $v.model.name | quote }}
- name: REVISION
  value: {{ $v.model.revision | quote }}
- name: MARK
  value: {{ printf "%s/pdproxy-fetched/%s" $v.model.storage.mountPath (printf "%s@%s" $v.model.name $v.model.revision | sha256sum | trunc 16) | quote }}
{{- end -}}

{{/* A role's init containers: the wait for weights, and the operator's. Takes (dict "root" $ "component" …). */}}
{{- define "pdproxy.node.initContainers" -}}
{{- $v := .root.Values -}}
{{- if $v.model.download.enabled }}
- name: wait-for-weights
  image: {{ include "pdproxy.image" (dict "root" .root "of" "node") | quote }}
  imagePullPolicy: {{ $v.image.node.pullPolicy }}
  command: [python3, -c]
  args:
    - |
      {{- .root.Files.Get "files/wait.py" | nindent 6 }}
  env:
    {{- include "pdproxy.download.env" .root | nindent 4 }}
  resources:
    requests: { cpu: 50m, memory: 64Mi }
  securityContext:
    {{- toYaml $v.nodes.securityContext | nindent 4 }}
  volumeMounts:
    - { name: models, mountPath: {{ $v.model.storage.mountPath | quote }}, readOnly: true }
{{- end }}
{{- with (get $v .component).initContainers }}
{{ toYaml . }}
{{- end }}
{{- end -}}
