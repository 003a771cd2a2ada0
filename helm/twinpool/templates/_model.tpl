{{/* Where the model comes from. All three sources end in a folder that is mounted read-only, or in the hub's cache. */}}

{{- define "twinpool.modelEnv" -}}
{{- if eq .Values.model.source "hf" -}}
{{- with .Values.model.hf.tokenSecret -}}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.model.hf.tokenKey }}
{{- end -}}
{{- else -}}
- name: TWINPOOL_MODEL__PATH
  value: {{ include "twinpool.modelFolder" . }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end -}}
{{- end -}}

{{/* The folder in the container: its last part names the model, unless config.model.name does. */}}
{{- define "twinpool.modelFolder" -}}
{{- if eq .Values.model.source "pvc" -}}
{{- clean (printf "/models/%s" .Values.model.pvc.path) -}}
{{- else -}}
/models/{{ base (trimSuffix "/" .Values.model.s3.uri) }}
{{- end -}}
{{- end -}}

{{- define "twinpool.modelMounts" -}}
{{- if ne .Values.model.source "hf" }}
- name: model
  mountPath: /models
  readOnly: true
{{- end }}
{{- end -}}

{{/* A dict with root and weights: whether the pod holds weights (the router does not). */}}
{{- define "twinpool.modelVolumes" -}}
{{- $model := .root.Values.model -}}
{{- $size := ternary $model.cacheSize "1Gi" .weights }}
- name: cache
  {{- if and (eq $model.source "hf") $model.hf.cacheClaim .weights }}
  persistentVolumeClaim:
    claimName: {{ $model.hf.cacheClaim }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ $size }}
  {{- end }}
{{- if eq $model.source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ $model.pvc.claimName }}
    readOnly: true
{{- else if eq $model.source "s3" }}
- name: model
  emptyDir:
    sizeLimit: {{ $size }}
{{- end }}
{{- end -}}

{{/* Copies the model before the container starts; a dict with root and weights. */}}
{{- define "twinpool.modelInit" -}}
{{- $s3 := .root.Values.model.s3 -}}
{{- if eq .root.Values.model.source "s3" -}}
- name: model
  image: {{ $s3.image }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [aws, s3, sync, --no-progress, {{ $s3.uri | quote }}, {{ include "twinpool.modelFolder" .root }}]
  {{- /* The router reads texts only: tokenizer, chat template, configuration. */}}
  args: {{ ternary (list) (list "--exclude" "*.safetensors" "--exclude" "*.bin" "--exclude" "*.pth" "--exclude" "*.gguf") .weights | toJson }}
  env:
    - name: HOME
      value: /tmp
    {{- with $s3.endpointUrl }}
    - name: AWS_ENDPOINT_URL
      value: {{ . | quote }}
    {{- end }}
    {{- with $s3.region }}
    - name: AWS_REGION
      value: {{ . }}
    {{- end }}
    {{- if $s3.credentialsSecret }}
    {{- range list "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
    - name: {{ . }}
      valueFrom:
        secretKeyRef:
          name: {{ $s3.credentialsSecret }}
          key: {{ . }}
    {{- end }}
    {{- end }}
  resources:
    requests: {cpu: "1", memory: 512Mi}
    limits: {memory: 2Gi}
  securityContext: {{- include "twinpool.containerSecurity" (dict "capabilities" nil) | nindent 4 }}
  volumeMounts:
    - name: model
      mountPath: /models
    - name: tmp
      mountPath: /tmp
{{- end -}}
{{- end -}}
