{{/* What the pods of router and workers have in common. */}}

{{- define "twinpool.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.runAsUser }}
runAsGroup: {{ .Values.runAsUser }}
fsGroup: {{ .Values.runAsUser }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* A dict with capabilities, a list of what is added. */}}
{{- define "twinpool.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- with .capabilities }}
  add: {{ toJson . }}
  {{- end }}
{{- end -}}

{{/* Environment of every twinpool process; a dict with root. */}}
{{- define "twinpool.env" -}}
- name: TWINPOOL_CONFIG
  value: /etc/twinpool/twinpool.yaml
- name: TWINPOOL_SESSION__TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "twinpool.tokenSecret" .root }}
      key: token
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: HOME
  value: /tmp
- name: HF_HOME
  value: /var/cache/twinpool/huggingface
- name: XDG_CACHE_HOME
  value: /var/cache/twinpool
- name: TRITON_CACHE_DIR
  value: /var/cache/twinpool/triton
{{- with include "twinpool.modelEnv" .root }}
{{ . }}
{{- end }}
{{- if .root.Values.tls.secretName }}
{{ include "twinpool.tlsEnv" .root }}
{{- end }}
{{- end -}}

{{/* Mounts and volumes of every twinpool container; a dict with root. */}}
{{- define "twinpool.mounts" -}}
- name: config
  mountPath: /etc/twinpool
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/twinpool
{{- include "twinpool.modelMounts" .root }}
{{- if .root.Values.tls.secretName }}
- name: tls
  mountPath: /etc/twinpool-tls
  readOnly: true
{{- end }}
{{- end -}}

{{- define "twinpool.volumes" -}}
- name: config
  configMap:
    name: {{ include "twinpool.fullname" .root }}-config
- name: tmp
  emptyDir: {}
{{- include "twinpool.modelVolumes" . }}
{{- with .root.Values.tls.secretName }}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{/* Where pods run; takes the router's or a pool's block. */}}
{{- define "twinpool.placement" -}}
{{- with .nodeSelector -}}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}
