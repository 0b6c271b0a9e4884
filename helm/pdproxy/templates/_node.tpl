{{/* The pod of a node. Takes (dict "root" $ "component" "prefill"|"decode" "part" "whole"|"leader"|"worker"). */}}
{{- define "pdproxy.node" -}}
{{- $v := .root.Values -}}
{{- $r := get $v .component -}}
{{- $serves := ne .part "worker" -}}
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
  # A service called pdproxy would otherwise leave PDPROXY_* variables in every pod.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add (include "pdproxy.waitSeconds" .root | int) (int $v.nodes.leaveSeconds) (int $v.nodes.drainSeconds) 30 }}
  {{- with $v.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $field := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
  {{- with get $r $field }}
  {{ $field }}:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- range $field := list "runtimeClassName" "schedulerName" "priorityClassName" }}
  {{- with get $r $field }}
  {{ $field }}: {{ . }}
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
        httpGet: { path: /health, port: http }
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: {{ div (add (int $v.nodes.startupSeconds) 9) 10 }}
      # A busy engine answers late: only one that has been silent for two minutes is started anew.
      livenessProbe:
        httpGet: { path: /health, port: http }
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 12
      readinessProbe:
        httpGet: { path: /health, port: http }
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
        - { name: models, mountPath: {{ $v.model.storage.mountPath }} }
        - { name: shm, mountPath: /dev/shm }
        {{- if $v.tickets.enabled }}
        - { name: tickets, mountPath: /etc/pdproxy/tickets, readOnly: true }
        {{- end }}
        {{- with $r.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: shm
      emptyDir: { medium: Memory, sizeLimit: {{ $v.nodes.sharedMemory }} }
    {{- include "pdproxy.node.models" .root | nindent 4 }}
    {{- if $v.tickets.enabled }}
    # Readable to whatever user the image runs as: nobody else is in the pod.
    - name: tickets
      secret: { secretName: {{ include "pdproxy.secret.tickets" .root }}, defaultMode: 0444 }
    {{- end }}
    {{- with $r.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "pdproxy.node.args" -}}
{{- $v := .root.Values -}}
{{- $r := get $v .component -}}
- {{ $v.model.name | quote }}
- --port={{ $v.nodes.httpPort }}
- --tensor-parallel-size={{ $r.tensorParallel }}
- --max-model-len={{ int64 $v.model.maxLength }}
- --gpu-memory-utilization={{ $v.model.gpuMemory }}
{{- with $v.model.blockSize }}
- --block-size={{ . }}
{{- end }}
{{- with $v.model.prefixMatchUnit }}
- --prefix-match-unit={{ . }}
{{- end }}
- --enable-prefix-caching
- --enable-prompt-tokens-details
{{- with $v.model.servedName }}
- --served-model-name={{ . }}
{{- end }}
{{- if ne .part "worker" }}
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
{{- if eq .part "worker" }}
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
{{- dict "kv_connector" "NixlConnector" "kv_connector_module_path" "connector.nixl_connector"
      "kv_role" (ternary "kv_producer" "kv_consumer" (eq .component "prefill"))
      "kv_load_failure_policy" "recompute" "kv_connector_extra_config" $extra | toJson -}}
{{- end -}}

{{- define "pdproxy.node.kvEvents" -}}
{{- dict "enable_kv_cache_events" true "endpoint" (printf "tcp://*:%d" (int .kvEvents.port))
      "replay_endpoint" (printf "tcp://*:%d" (int .kvEvents.replayPort)) | toJson -}}
{{- end -}}

{{/* The chart's own variables of a node. */}}
{{- define "pdproxy.node.env" -}}
{{- $v := .root.Values -}}
- name: POD_IP
  valueFrom: { fieldRef: { fieldPath: status.podIP } }
- name: VLLM_NIXL_SIDE_CHANNEL_HOST
  value: $(POD_IP)
- name: VLLM_NIXL_SIDE_CHANNEL_PORT
  value: {{ $v.transfer.sideChannelPort | quote }}
- name: VLLM_PLUGINS
  value: pdproxy_connector,pdproxy_endpoints
- name: UCX_TLS
  value: {{ $v.transfer.ucxTransports | quote }}
- name: UCX_NET_DEVICES
  value: {{ $v.transfer.ucxDevices | quote }}
- name: UCX_TCP_PORT_RANGE
  value: "{{ $v.transfer.ucxPorts.first }}-{{ $v.transfer.ucxPorts.last }}"
- name: HF_HOME
  value: {{ $v.model.storage.mountPath }}
- name: NODE_PORT
  value: {{ $v.nodes.httpPort | quote }}
{{- if ne .part "whole" }}
- name: VLLM_HOST_IP
  value: $(POD_IP)
- name: NODE_RANK
  valueFrom: { fieldRef: { fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']" } }
{{- end }}
{{- with $v.model.tokenSecret }}
{{- if .name }}
- name: HF_TOKEN
  valueFrom: { secretKeyRef: { name: {{ .name }}, key: {{ .key }} } }
{{- end }}
{{- end }}
{{- if $v.access.enabled }}
- name: VLLM_API_KEY
  valueFrom: { secretKeyRef: { name: {{ include "pdproxy.secret.access" .root }}, key: node.key } }
{{- end }}
{{- end -}}

{{- define "pdproxy.node.resources" -}}
{{- $resources := deepCopy (.resources | default dict) -}}
{{- $limits := $resources.limits | default dict -}}
{{- if .gpus.count -}}{{- $_ := set $limits .gpus.resource .gpus.count -}}{{- end -}}
{{- if .rdma.enabled -}}{{- $_ := set $limits .rdma.resource .rdma.count -}}{{- end -}}
{{- set $resources "limits" $limits | toYaml -}}
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
  emptyDir: { sizeLimit: {{ .size }} }
{{- else if eq .kind "hostPath" -}}
- name: models
  hostPath: { path: {{ .hostPath }}, type: DirectoryOrCreate }
{{- else if eq .kind "existingClaim" -}}
- name: models
  persistentVolumeClaim: { claimName: {{ .existingClaim }} }
{{- else if eq .kind "claim" -}}
- name: models
  persistentVolumeClaim: { claimName: {{ include "pdproxy.fullname" $ }}-models }
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pdproxy.claim" -}}
accessModes:
  {{- toYaml .accessModes | nindent 2 }}
{{- with .storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: { requests: { storage: {{ .size }} } }
{{- end -}}
