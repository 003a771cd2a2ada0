{{/* Certificates and API keys. tls.secretName is every process's own; the router may show another one to clients. Files
     that change are taken over without a restart. */}}

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

{{/* What the router alone has: a list of dicts with the volume's name, its Secret, the key that is mounted (empty: all) and
     the variables that name files. */}}
{{- define "twinpool.routerSecrets" -}}
{{- $found := list -}}
{{- if and .Values.tls.public .Values.tls.publicSecretName -}}
{{- $files := dict "TWINPOOL_TLS__PUBLIC_CERT" "tls.crt" "TWINPOOL_TLS__PUBLIC_KEY" "tls.key" -}}
{{- $found = append $found (dict "name" "public-tls" "secret" .Values.tls.publicSecretName "files" $files) -}}
{{- end -}}
{{- with .Values.tls.clientCaSecretName -}}
{{- $found = append $found (dict "name" "client-ca" "secret" . "files" (dict "TWINPOOL_TLS__PUBLIC_CLIENT_CA" "ca.crt")) -}}
{{- end -}}
{{- with .Values.auth.apiKeysSecret -}}
{{- $found = append $found (dict "name" "api-keys" "secret" . "files" (dict "TWINPOOL_AUTH__KEYS_FILE" "keys.yaml")) -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{/* "true" when the router's gRPC and HTTP ports speak TLS. */}}
{{- define "twinpool.isPublicTls" -}}
{{- and .Values.tls.public (or .Values.tls.secretName .Values.tls.publicSecretName | not | not) -}}
{{- end -}}

{{/* The Secret whose ca.crt clients in the namespace trust: the certificate's that the router shows. */}}
{{- define "twinpool.publicTlsSecret" -}}
{{- .Values.tls.publicSecretName | default .Values.tls.secretName -}}
{{- end -}}
