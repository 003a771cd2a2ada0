{{/* Names, labels, images: what every object of the release shares. */}}

{{- define "twinpool.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Short enough that "-prefill-nodes" and a pod's suffix still fit into 63 characters. */}}
{{- define "twinpool.fullname" -}}
{{- $name := include "twinpool.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels that select pods; a dict with root and component. They never change during a release's life. */}}
{{- define "twinpool.selector" -}}
app.kubernetes.io/name: {{ include "twinpool.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of a pod; a dict with root and component. Without versions, whose change would restart pods for nothing. */}}
{{- define "twinpool.podLabels" -}}
{{ include "twinpool.selector" . }}
app.kubernetes.io/part-of: twinpool
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of an object; a dict with root and component. */}}
{{- define "twinpool.labels" -}}
{{ include "twinpool.podLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "twinpool.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "twinpool.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "twinpool.tokenSecret" -}}
{{- .Values.auth.existingSecret | default (printf "%s-cluster-token" (include "twinpool.fullname" .)) -}}
{{- end -}}

{{/* An image reference; a dict with root and kind (router or worker). */}}
{{- define "twinpool.image" -}}
{{- $image := index .root.Values.image .kind -}}
{{- $tag := .root.Chart.AppVersion -}}
{{- if eq .kind "worker" -}}{{- $tag = printf "%s-%s" $tag .root.Values.accelerator -}}{{- end -}}
{{- with .root.Values.image.registry -}}{{- trimSuffix "/" . -}}/{{- end -}}
{{- $image.repository -}}
{{- if $image.digest -}}@{{- $image.digest -}}{{- else -}}:{{- $image.tag | default $tag -}}{{- end -}}
{{- end -}}

{{/* A number of the configuration: a dict with config (the map), path (list of keys) and default, which is the program's. */}}
{{- define "twinpool.number" -}}
{{- $here := .config -}}
{{- range .path -}}{{- $here = get (default dict $here) . -}}{{- end -}}
{{- if kindIs "invalid" $here -}}{{- .default -}}{{- else -}}{{- $here -}}{{- end -}}
{{- end -}}

{{/* Ranks of a worker of a role (dict with root and role) and those of each of its pods. */}}
{{- define "twinpool.ranks" -}}
{{- $config := .root.Values.config -}}
{{- $tp := include "twinpool.number" (dict "config" $config "path" (list .role "tp_size") "default" 1) | int -}}
{{- $pp := include "twinpool.number" (dict "config" $config "path" (list .role "pp_size") "default" 1) | int -}}
{{- mul $tp $pp -}}
{{- end -}}

{{- define "twinpool.ranksPerPod" -}}
{{- $nodes := (index .root.Values .role).nodesPerReplica | int -}}
{{- div (include "twinpool.ranks" . | int) $nodes -}}
{{- end -}}

{{/* What both pools must have in common to work together: its change rolls both. A dict with root. */}}
{{- define "twinpool.generation" -}}
{{- $common := omit .root.Values.config "router" "prefill" "decode" "logging" "session" -}}
{{- list (include "twinpool.image" (dict "root" .root "kind" "worker")) .root.Values.model $common | toJson | sha256sum | trunc 16 -}}
{{- end -}}

{{/* Changes when the part of the configuration changes that a component (router, prefill, decode) reads. */}}
{{- define "twinpool.checksum" -}}
{{- $others := without (list "router" "prefill" "decode") .component -}}
{{- omit .root.Values.config (first $others) (last $others) | toJson | sha256sum | trunc 16 -}}
{{- end -}}
