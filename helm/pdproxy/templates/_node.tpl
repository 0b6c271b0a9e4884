{{/* The pod of a node. Takes (dict "root" $ "component" "prefill"|"decode"|"node" "part" "whole"|"leader"|"worker"). */}}
{{- define "pdproxy.node" -}}
{{- $v := .root.Values -}}
{{- $r := get $v .component -}}
{{- $serves := include "pdproxy.node.serves" . -}}
metadata:
  labels:
    {{- include "pdproxy.podLabels" (dict "root" .root "component" .component "more" $r.podLabels) | nindent 4 }}
  annotations:
    kubectl.kubernetes.io/default-container: vllm
    {{- with $r.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "pdproxy.fullname" .root }}-node
  automountServiceAccountToken: false
  {{- with include "pdproxy.node.podSecurity" . | fromYaml }}
  securityContext:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  # A service called pdproxy would otherwise leave PDPROXY_* variables in every pod.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add (include "pdproxy.waitSeconds" .root | int) (int $v.nodes.leaveSeconds) (int $v.nodes.drainSeconds) 30 }}
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "pdproxy.node.initContainers" . | fromYamlArray }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $field := list "resourceClaims" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
  {{- with get $r $field }}
  {{ $field }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- range $field := list "runtimeClassName" "schedulerName" "priorityClassName" }}
  {{- with get $r $field }}
  {{ $field }}: {{ . | quote }}
  {{- end }}
  {{- end }}
  containers:
    - name: vllm
      image: {{ include "pdproxy.image" (dict "root" .root "of" "node") | quote }}
      imagePullPolicy: {{ $v.image.node.pullPolicy }}
      # The image's entry point is `vllm serve`.
      args:
        {{- include "pdproxy.node.args" . | nindent 8 }}
      env:
        {{- $own := fromYamlArray (include "pdproxy.node.env" .) }}
        {{- include "pdproxy.env" (dict "own" $own "extra" $r.extraEnv) | nindent 8 }}
      ports:
        {{- if $serves }}
        - { name: http, containerPort: {{ $v.nodes.httpPort }}, protocol: TCP }
        {{- end }}
        - { name: side-channel, containerPort: {{ $v.transfer.sideChannelPort }}, protocol: TCP }
      {{- if $serves }}
      startupProbe:
        httpGet: { path: /health, port: http, scheme: {{ include "pdproxy.scheme" .root | upper }} }
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: {{ div (add (int $v.nodes.startupSeconds) 9) 10 }}
      # A busy engine answers late: only one that has been silent for two minutes is started anew.
      livenessProbe:
        httpGet: { path: /health, port: http, scheme: {{ include "pdproxy.scheme" .root | upper }} }
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 12
      readinessProbe:
        httpGet: { path: /health, port: http, scheme: {{ include "pdproxy.scheme" .root | upper }} }
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 3
      {{- end }}
      {{- with include "pdproxy.preStop" .root }}
      lifecycle:
        preStop:
          {{- . | nindent 10 }}
      {{- end }}
      resources:
        {{- include "pdproxy.node.resources" $r | nindent 8 }}
      securityContext:
        {{- include "pdproxy.node.security" . | nindent 8 }}
      volumeMounts:
        - { name: models, mountPath: {{ $v.model.storage.mountPath | quote }} }
        - { name: shm, mountPath: /dev/shm }
        {{- if eq $v.nodes.compileCache.kind "weights" }}
        - { name: models, mountPath: {{ $v.nodes.compileCache.mountPath | quote }}, subPath: pdproxy-compile-cache/{{ .component }} }
        {{- else }}
        - { name: compile-cache, mountPath: {{ $v.nodes.compileCache.mountPath | quote }}, subPath: {{ .component }} }
        {{- end }}
        {{- if $v.nodes.tls.enabled }}
        - { name: tls, mountPath: /etc/pdproxy/tls, readOnly: true }
        {{- end }}
        {{- if $v.tickets.enabled }}
        - { name: tickets, mountPath: /etc/pdproxy/tickets, readOnly: true }
        {{- end }}
        {{- with $r.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: shm
      emptyDir: { medium: Memory, sizeLimit: {{ $v.nodes.sharedMemory | quote }} }
    {{- include "pdproxy.node.models" .root | nindent 4 }}
    {{- if $v.tickets.enabled }}
    # Readable to whatever user the image runs as: nobody else is in the pod.
    - name: tickets
      secret: { secretName: {{ include "pdproxy.secret.tickets" .root | quote }}, defaultMode: 0444 }
    {{- end }}
    {{- include "pdproxy.compileCache.volume" $v | nindent 4 }}
    {{- if $v.nodes.tls.enabled }}
    - name: tls
      secret: { secretName: {{ $v.nodes.tls.secret | quote }}, defaultMode: 0444 }
    {{- end }}
    {{- with $r.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Whether this pod has an HTTP server, "" if not: of an engine over several hosts the first has, or, where it has data-parallel
     ranks, each has one for its own ranks. Takes what pdproxy.node takes. */}}
{{- define "pdproxy.node.serves" -}}
{{- if or (ne .part "worker") (gt (int (get .root.Values .component).parallel.data) 1) }}serves{{ end -}}
{{- end -}}

{{- define "pdproxy.node.args" -}}
{{- $v := .root.Values -}}
{{- $r := get $v .component -}}
{{- $serves := include "pdproxy.node.serves" . -}}
{{- $ranks := int $r.parallel.data -}}
- {{ $v.model.name | quote }}
- --port={{ $v.nodes.httpPort }}
{{- if $v.ipv6 }}
- "--host=::"
{{- end }}
{{- if $v.nodes.tls.enabled }}
- --ssl-certfile=/etc/pdproxy/tls/tls.crt
- --ssl-keyfile=/etc/pdproxy/tls/tls.key
- --enable-ssl-refresh
{{- end }}
- --tensor-parallel-size={{ $r.parallel.tensor }}
{{- if gt $ranks 1 }}
- --data-parallel-size={{ $ranks }}
{{- end }}
{{- if $r.parallel.expert }}
- --enable-expert-parallel
{{- end }}
- --max-model-len={{ int64 $v.model.maxLength }}
- --max-num-seqs={{ int64 $v.model.maxSequences }}
- --gpu-memory-utilization={{ $v.model.gpuMemory }}
{{- with $v.model.blockSize }}
- --block-size={{ . }}
{{- end }}
{{- with $v.model.prefixMatchUnit }}
- --prefix-match-unit={{ . }}
{{- end }}
{{- with $v.model.toolParser }}
- --enable-auto-tool-choice
- --tool-call-parser={{ . }}
{{- end }}
{{- with $v.model.reasoningParser }}
- --reasoning-parser={{ . }}
{{- end }}
- --enable-prefix-caching
- --enable-prompt-tokens-details
{{- with $v.model.revision }}
- {{ printf "--revision=%s" . | quote }}
- {{ printf "--tokenizer-revision=%s" . | quote }}
{{- end }}
{{- /* Offline, vLLM puts the path of the weights in the place of the model's name. */ -}}
{{- with $v.model.servedName | default (ternary $v.model.name "" $v.model.download.enabled) }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
{{- if $serves }}
- --shutdown-timeout={{ $v.nodes.drainSeconds }}
{{- end }}
- {{ printf "--kv-transfer-config=%s" (include "pdproxy.node.transfer" .) | quote }}
{{- if $v.kvEvents.enabled }}
- --prefix-caching-hash-algo=sha256_cbor
- {{ printf "--kv-events-config=%s" (include "pdproxy.node.kvEvents" $v) | quote }}
{{- end }}
{{- if ne .part "whole" }}
- --nnodes={{ $r.hosts }}
- --node-rank=$(NODE_RANK)
- --master-addr=$(LWS_LEADER_ADDRESS)
{{- end }}
{{- if and (ne .part "whole") (gt $ranks 1) }}
- --data-parallel-size-local={{ div $ranks (int $r.hosts) }}
- --data-parallel-hybrid-lb
{{- end }}
{{- if not $serves }}
- --headless
{{- end }}
{{- range concat $v.model.extraArgs $r.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "pdproxy.node.transfer" -}}
{{- $v := .root.Values -}}
{{- $extra := dict "kv_lease_duration" $v.transfer.leaseSeconds -}}
{{- with $v.model.weightsLabel -}}
  {{- $_ := set $extra "pdproxy_weights_label" . -}}
{{- end -}}
{{- if $v.tickets.enabled -}}
  {{- $_ := set $extra "pdproxy_key_file" "/etc/pdproxy/tickets/ticket.keys" -}}
{{- end -}}
{{- if eq .component "node" -}}
  {{- $_ := set $extra "pdproxy_roles" (list "prefill" "decode") -}}
{{- end -}}
{{- dict "kv_connector" "NixlConnector" "kv_connector_module_path" "pdproxy_connector.nixl_connector"
      "kv_role" (ternary "kv_producer" "kv_consumer" (eq .component "prefill"))
      "kv_load_failure_policy" "recompute" "kv_connector_extra_config" $extra | toJson -}}
{{- end -}}

{{- define "pdproxy.node.kvEvents" -}}
{{- /* vLLM binds a port of its own at IPv4 addresses alone; port 0 at VLLM_HOST_IP, whatever it is. */ -}}
{{- $port := ternary 0 (int .kvEvents.port) .ipv6 -}}
{{- $replay := ternary 0 (int .kvEvents.replayPort) .ipv6 -}}
{{- dict "enable_kv_cache_events" true "endpoint" (printf "tcp://*:%d" $port)
      "replay_endpoint" (printf "tcp://*:%d" $replay) | toJson -}}
{{- end -}}

{{/* The chart's own variables of a node. */}}
{{- define "pdproxy.node.env" -}}
{{- $v := .root.Values -}}
{{- $ucx := (get $v .component).ucx -}}
- name: POD_IP
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
- name: VLLM_NIXL_SIDE_CHANNEL_HOST
  value: $(POD_IP)
- name: VLLM_NIXL_SIDE_CHANNEL_PORT
  value: {{ $v.transfer.sideChannelPort | quote }}
- name: VLLM_PLUGINS
  value: pdproxy_connector,pdproxy_endpoints
- name: UCX_TLS
  value: {{ $ucx.transports | default $v.transfer.ucxTransports | quote }}
- name: UCX_NET_DEVICES
  value: {{ $ucx.devices | default $v.transfer.ucxDevices | quote }}
- name: UCX_TCP_PORT_RANGE
  value: "{{ $v.transfer.ucxPorts.first }}-{{ $v.transfer.ucxPorts.last }}"
- name: HF_HOME
  value: {{ $v.model.storage.mountPath | quote }}
{{- if $v.model.download.enabled }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{ include "pdproxy.compileCache.env" $v | trim }}
- name: NODE_PORT
  value: {{ $v.nodes.httpPort | quote }}
# vLLM gives up after ten minutes, where several API servers wait for engines that load.
- name: VLLM_ENGINE_READY_TIMEOUT_S
  value: {{ $v.nodes.startupSeconds | quote }}
{{- if or $v.ipv6 (ne .part "whole") }}
- name: VLLM_HOST_IP
  value: $(POD_IP)
{{- end }}
{{- if ne .part "whole" }}
- name: NODE_RANK
  valueFrom: { fieldRef: { fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']" } }
{{- end }}
{{- with $v.model.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom: { secretKeyRef: { name: {{ .name | quote }}, key: {{ .key | quote }} } }
{{- end }}
{{- end }}
{{- if $v.access.enabled }}
- name: VLLM_API_KEY
  valueFrom: { secretKeyRef: { name: {{ include "pdproxy.secret.access" .root | quote }}, key: node.key } }
{{- end }}
{{- end -}}

{{- define "pdproxy.node.resources" -}}
{{- $resources := deepCopy (.resources | default dict) -}}
{{- $limits := $resources.limits | default dict -}}
{{- if .gpus.count -}}{{- $_ := set $limits .gpus.resource .gpus.count -}}{{- end -}}
{{- if .rdma.enabled -}}{{- $_ := set $limits .rdma.resource .rdma.count -}}{{- end -}}
{{- set $resources "limits" $limits | toYaml -}}
{{- end -}}

{{/* Whose processes a role's pods are. Takes (dict "root" $ "component" …). */}}
{{- define "pdproxy.node.podSecurity" -}}
{{- $v := .root.Values -}}
{{- $context := deepCopy $v.nodes.podSecurityContext -}}
{{- if or (get $v .component).rdma.enabled (has "hostPath" (list $v.model.storage.kind $v.nodes.compileCache.kind)) -}}
  {{- $_ := set $context "runAsNonRoot" false -}}
  {{- $_ := set $context "runAsUser" 0 -}}
  {{- $_ := set $context "runAsGroup" 0 -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{- define "pdproxy.node.security" -}}
{{- $context := deepCopy .root.Values.nodes.securityContext -}}
{{- if (get .root.Values .component).rdma.enabled -}}
  {{- $capabilities := $context.capabilities | default dict -}}
  {{- $_ := set $capabilities "add" (append ($capabilities.add | default list) "IPC_LOCK" | uniq) -}}
  {{- $_ := set $context "capabilities" $capabilities -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{- define "pdproxy.node.models" -}}
{{- with .Values.model.storage -}}
{{- if eq .kind "emptyDir" -}}
- name: models
  emptyDir: { sizeLimit: {{ .size | quote }} }
{{- else if eq .kind "hostPath" -}}
- name: models
  hostPath: { path: {{ .hostPath | quote }}, type: DirectoryOrCreate }
{{- else if eq .kind "existingClaim" -}}
- name: models
  persistentVolumeClaim: { claimName: {{ .existingClaim | quote }} }
{{- else if eq .kind "claim" -}}
- name: models
  persistentVolumeClaim: { claimName: {{ include "pdproxy.fullname" $ }}-models }
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pdproxy.claim" -}}
accessModes:
  {{- .accessModes | default (list (ternary "ReadWriteMany" "ReadWriteOnce" (eq .kind "claim"))) | toYaml | nindent 2 }}
{{- with .storageClass }}
storageClassName: {{ . | quote }}
{{- end }}
resources: { requests: { storage: {{ .size | quote }} } }
{{- end -}}
