{{/* Certificates. tls.secretName is every process's own; the router may show another one to clients. Files that change are
     taken over without a restart. */}}

{{- define "twinpool.tlsEnv" -}}
- name: TWINPOOL_TLS__CERT
  value: /etc/twinpool-tls/tls.crt
- name: TWINPOOL_TLS__KEY
  value: /etc/twinpool-tls/tls.key
- name: TWINPOOL_TLS__CA
  value: /etc/twinpool-tls/ca.crt
- name: TWINPOOL_TLS__SERVER_NAME
  value: {{ .Values.tls.serverName }}
- name: TWINPOOL_TLS__PUBLIC
  value: {{ .Values.tls.public | quote }}
{{- end -}}

{{- define "twinpool.publicTlsEnv" -}}
{{- if and .Values.tls.public .Values.tls.publicSecretName -}}
- name: TWINPOOL_TLS__PUBLIC_CERT
  value: /etc/twinpool-public-tls/tls.crt
- name: TWINPOOL_TLS__PUBLIC_KEY
  value: /etc/twinpool-public-tls/tls.key
{{ end -}}
{{- if .Values.tls.clientCaSecretName -}}
- name: TWINPOOL_TLS__PUBLIC_CLIENT_CA
  value: /etc/twinpool-client-ca/ca.crt
{{- end -}}
{{- end -}}

{{- define "twinpool.publicTlsMounts" -}}
{{- if and .Values.tls.public .Values.tls.publicSecretName -}}
- name: public-tls
  mountPath: /etc/twinpool-public-tls
  readOnly: true
{{ end -}}
{{- if .Values.tls.clientCaSecretName -}}
- name: client-ca
  mountPath: /etc/twinpool-client-ca
  readOnly: true
{{- end -}}
{{- end -}}

{{- define "twinpool.publicTlsVolumes" -}}
{{- if and .Values.tls.public .Values.tls.publicSecretName -}}
- name: public-tls
  secret:
    secretName: {{ .Values.tls.publicSecretName }}
    defaultMode: 0440
{{ end -}}
{{- with .Values.tls.clientCaSecretName -}}
- name: client-ca
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items:
      - key: ca.crt
        path: ca.crt
{{- end -}}
{{- end -}}

{{/* "true" when the router's gRPC and HTTP ports speak TLS. */}}
{{- define "twinpool.isPublicTls" -}}
{{- and .Values.tls.public (or .Values.tls.secretName .Values.tls.publicSecretName | not | not) -}}
{{- end -}}

{{/* The Secret whose ca.crt clients in the namespace trust: the certificate's that the router shows. */}}
{{- define "twinpool.publicTlsSecret" -}}
{{- .Values.tls.publicSecretName | default .Values.tls.secretName -}}
{{- end -}}
