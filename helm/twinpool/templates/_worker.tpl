{{/* A pool: one template for prefill and decode. Each takes a dict with root and role; where it says member, that is what
     the pod is of its worker: alone, leader, follower, or ordinal (leader or follower, by the number in its name). */}}

{{/* Seconds from SIGTERM to SIGKILL: the drain, promised KV being read, and some for the end of process and ranks. */}}
{{- define "twinpool.workerGrace" -}}
{{- $config := .root.Values.config -}}
{{- $drain := include "twinpool.number" (dict "config" $config "path" (list .role "drain_timeout_s") "default" 30) | float64 -}}
{{- $read := include "twinpool.number" (dict "config" $config "path" (list "transport" "read_timeout_s") "default" 20) | float64 -}}
{{- if eq .role "decode" -}}{{- $read = 0.0 -}}{{- end -}}
{{- addf $drain $read 40 | ceil | int -}}
{{- end -}}

{{/* Takes member. */}}
{{- define "twinpool.workerPod" -}}
{{- $root := .root -}}
{{- $role := .role -}}
{{- $pool := index $root.Values $role -}}
{{- $fullname := include "twinpool.fullname" $root -}}
{{- $selector := dict "root" $root "component" $role -}}
metadata:
  labels:
    {{- include "twinpool.podLabels" $selector | nindent 4 }}
    twinpool.dev/generation: {{ include "twinpool.generation" . | quote }}
    {{- with $pool.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    twinpool.dev/config: {{ include "twinpool.checksum" $selector | quote }}
    {{- with $pool.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "twinpool.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "twinpool.workerGrace" . }}
  {{- with $root.Values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext: {{- include "twinpool.podSecurity" $root | nindent 4 }}
  {{- with include "twinpool.placement" $pool }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with include "twinpool.workerInit" . }}
  initContainers: {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ $role }}
      image: {{ include "twinpool.image" (dict "root" $root "kind" "worker") }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: {{- include "twinpool.workerCommand" . | nindent 8 }}
      env:
        {{- include "twinpool.env" . | nindent 8 }}
        {{- include "twinpool.workerEnv" . | nindent 8 }}
        {{- with $pool.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - name: worker
          containerPort: 9000
        {{- if eq $role "prefill" }}
        - name: kv
          containerPort: 9001
        {{- end }}
        - name: health
          containerPort: 9002
      startupProbe:
        grpc: {port: 9002}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $pool.startupSeconds 4) 5 }}
      readinessProbe:
        {{- if eq .member "alone" }}
        grpc: {port: 9002, service: twinpool.worker.v1.WorkerService}
        {{- else }}
        grpc: {port: 9002}
        {{- end }}
        periodSeconds: 2
        timeoutSeconds: 5
      livenessProbe:
        grpc: {port: 9002}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      resources: {{- include "twinpool.workerResources" . | nindent 8 }}
      securityContext:
        {{- $added := ternary (list "IPC_LOCK") nil $root.Values.transport.rdma.enabled }}
        {{- include "twinpool.containerSecurity" (dict "capabilities" $added) | nindent 8 }}
      volumeMounts:
        {{- include "twinpool.mounts" . | nindent 8 }}
        - name: shm
          mountPath: /dev/shm
  volumes:
    {{- include "twinpool.volumes" (dict "root" $root "weights" true) | nindent 4 }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $pool.shmSize }}
{{- end -}}

{{/* What runs before the worker; takes member. */}}
{{- define "twinpool.workerInit" -}}
{{- $inits := list (include "twinpool.modelInit" (dict "root" .root "weights" true)) -}}
{{- if and (eq .role "prefill") (ne .member "follower") .root.Values.rollout.decodeFirst -}}
{{- $inits = append $inits (include "twinpool.waitForDecode" .) -}}
{{- end -}}
{{- compact $inits | join "\n" -}}
{{- end -}}

{{- define "twinpool.workerEnv" -}}
{{- $prefix := printf "TWINPOOL_%s__" (upper .role) -}}
- name: {{ $prefix }}HOST
  value: $(POD_IP)
- name: {{ $prefix }}PORT
  value: "9000"
{{- if eq .role "prefill" }}
- name: {{ $prefix }}KV_PORT
  value: "9001"
{{- end }}
- name: {{ $prefix }}HEALTH_PORT
  value: "9002"
- name: {{ $prefix }}WORKER_ID
  value: $(POD_NAME)
- name: TWINPOOL_MODEL__DEVICE
  value: {{ .root.Values.accelerator }}
{{- if ne .member "alone" }}
- name: {{ $prefix }}LAUNCHER
  value: ray
- name: TWINPOOL_RAY__HEAD_PORT
  value: {{ .root.Values.ray.headPort | quote }}
{{- if eq .root.Values.accelerator "cpu" }}
{{- /* Each rank takes a CPU of Ray's: so a node takes as many as it should. GPUs count themselves. */}}
- name: TWINPOOL_RAY__NODE_CPUS
  value: {{ include "twinpool.ranksPerPod" . | quote }}
- name: TWINPOOL_RAY__CPUS_PER_RANK
  value: "1"
{{- end }}
- name: TWINPOOL_FOLLOWER__HOST
  value: $(POD_IP)
- name: TWINPOOL_FOLLOWER__PORT
  value: "9002"
{{- end }}
{{- if eq .member "ordinal" }}
- name: NODES
  value: {{ (index .root.Values .role).nodesPerReplica | quote }}
- name: SUBDOMAIN
  value: {{ include "twinpool.fullname" .root }}-{{ .role }}-nodes
{{- end }}
{{- end -}}

{{/* Takes member. With ordinals every n-th pod leads, and the n - 1 after it follow it. */}}
{{- define "twinpool.workerCommand" -}}
{{- if eq .member "follower" -}}
[twinpool, serve, follower, --head, "$(LWS_LEADER_ADDRESS):$(TWINPOOL_RAY__HEAD_PORT)"]
{{- else if eq .member "ordinal" -}}
- sh
- -c
- |
  ordinal=${POD_NAME##*-}
  leader=$((ordinal / NODES * NODES))
  if [ "$ordinal" -eq "$leader" ]; then exec twinpool serve {{ .role }}; fi
  exec twinpool serve follower --head "${POD_NAME%-*}-$leader.$SUBDOMAIN:$TWINPOOL_RAY__HEAD_PORT"
{{- else -}}
[twinpool, serve, {{ .role }}]
{{- end -}}
{{- end -}}

{{/* Where routers find the workers of a pool: a list of names with ports, separated by commas. */}}
{{- define "twinpool.workerNames" -}}
{{- $pool := index .root.Values .role -}}
{{- $name := printf "%s-%s" (include "twinpool.fullname" .root) .role -}}
{{- if eq (include "twinpool.hasOrdinals" .) "true" -}}
{{- $names := list -}}
{{- range until ($pool.autoscaling.maxReplicas | int) -}}
{{- $names = append $names (printf "%s-%d.%s-nodes:9000" $name (mul . $pool.nodesPerReplica) $name) -}}
{{- end -}}
{{- join "," $names -}}
{{- else -}}
{{- $name }}:9000
{{- end -}}
{{- end -}}

{{/* "true" when the pods of a pool form groups by their ordinals. */}}
{{- define "twinpool.hasOrdinals" -}}
{{- $pool := index .root.Values .role -}}
{{- and (gt ($pool.nodesPerReplica | int) 1) (eq $pool.groupKind "StatefulSet") -}}
{{- end -}}

{{/* The pool's resources, its GPUs and RDMA devices: extended resources are limits. */}}
{{- define "twinpool.workerResources" -}}
{{- $pool := index .root.Values .role -}}
{{- $rdma := .root.Values.transport.rdma -}}
{{- $devices := dict -}}
{{- if eq .root.Values.accelerator "cuda" -}}
{{- $devices = set $devices $pool.gpuResource (include "twinpool.ranksPerPod" .) -}}
{{- end -}}
{{- if $rdma.enabled -}}{{- $devices = set $devices $rdma.resource (toString $rdma.count) -}}{{- end -}}
{{- merge (dict "limits" $devices) (deepCopy $pool.resources) | toYaml -}}
{{- end -}}

{{/* Ends at once unless decode workers are ready but none of this generation: then a new prefill worker has no partner. */}}
{{- define "twinpool.waitForDecode" -}}
{{- $decode := printf "%s-decode" (include "twinpool.fullname" .root) -}}
- name: wait-for-decode
  image: {{ include "twinpool.image" (dict "root" .root "kind" "worker") }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command:
    - sh
    - -c
    - until getent ahosts "$SAME_KIND" || ! getent ahosts "$ANY_KIND"; do sleep 2; done
  env:
    - name: SAME_KIND
      value: {{ $decode }}-new
    - name: ANY_KIND
      value: {{ $decode }}
  resources:
    requests: {cpu: 10m, memory: 16Mi}
    limits: {memory: 64Mi}
  securityContext: {{- include "twinpool.containerSecurity" (dict "capabilities" nil) | nindent 4 }}
{{- end -}}

{{/* With LeaderWorkerSet only leaders serve. */}}
{{- define "twinpool.leaderSelector" -}}
{{- $pool := index .root.Values .role -}}
{{- if and (gt ($pool.nodesPerReplica | int) 1) (eq $pool.groupKind "LeaderWorkerSet") -}}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end -}}
{{- end -}}
