{{/* What the schema cannot say. Each message names the value and the way out. */}}

{{- define "twinpool.checks" -}}
{{- $values := .Values -}}
{{- range list "prefill" "decode" -}}
{{- $pool := index $values . -}}
{{- $nodes := $pool.nodesPerReplica | int -}}
{{- $ranks := include "twinpool.ranks" (dict "root" $ "role" .) | int -}}
{{- if mod $ranks $nodes -}}
{{- fail (printf "%s.nodesPerReplica is %d, which does not divide the %d ranks (config.%s.tp_size × pp_size); choose one that does" . $nodes $ranks .) -}}
{{- end -}}
{{- if gt ($pool.autoscaling.minReplicas | int) ($pool.autoscaling.maxReplicas | int) -}}
{{- fail (printf "%s.autoscaling.minReplicas is larger than maxReplicas; lower it" .) -}}
{{- end -}}
{{- if and (has $pool.scaling (list "keda" "hpa")) (eq ($pool.autoscaling.minReplicas | int) 0) -}}
{{- if or (eq . "decode") (eq $pool.scaling "hpa") -}}
{{- fail (printf "%s.autoscaling.minReplicas is 0: only prefill can go to zero, and only with scaling keda; set it to 1 or more" .) -}}
{{- end -}}
{{- end -}}
{{- if and (has $pool.scaling (list "keda" "hpa")) (gt $nodes 1) (ne $pool.groupKind "LeaderWorkerSet") -}}
{{- fail (printf "%s.scaling is %s, which counts pods, but a worker of this pool is a group of %d; set %s.groupKind to LeaderWorkerSet, or %s.scaling to fixed or external" . $pool.scaling $nodes . .) -}}
{{- end -}}
{{- if and (eq (include "twinpool.hasOrdinals" (dict "root" $ "role" .)) "true") (gt ($pool.replicas | int) ($pool.autoscaling.maxReplicas | int)) -}}
{{- fail (printf "%s.replicas is %d, but routers look for %s.autoscaling.maxReplicas (%d) groups; raise that" . ($pool.replicas | int) . ($pool.autoscaling.maxReplicas | int)) -}}
{{- end -}}
{{- if and (eq $pool.scaling "keda") (not ($.Capabilities.APIVersions.Has "keda.sh/v1alpha1")) -}}
{{- fail (printf "%s.scaling is keda, but the cluster has no keda.sh/v1alpha1; install KEDA (helm template: --api-versions keda.sh/v1alpha1) or choose another scaling" .) -}}
{{- end -}}
{{- if and (gt $nodes 1) (eq $pool.groupKind "LeaderWorkerSet") (not ($.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1")) -}}
{{- fail (printf "%s.groupKind is LeaderWorkerSet, but the cluster has no leaderworkerset.x-k8s.io/v1; install LeaderWorkerSet (helm template: --api-versions leaderworkerset.x-k8s.io/v1) or choose StatefulSet" .) -}}
{{- end -}}
{{- end -}}
{{- if and (eq ($values.decode.scaling) "fixed") (eq ($values.decode.replicas | int) 0) -}}
{{- fail "decode.replicas is 0, so nothing could generate; set it to 1 or more" -}}
{{- end -}}
{{- if and (eq (dig "router" "disaggregate" "auto" $values.config) "always") (or (and (eq $values.prefill.scaling "fixed") (eq ($values.prefill.replicas | int) 0)) (and (eq $values.prefill.scaling "keda") (eq ($values.prefill.autoscaling.minReplicas | int) 0))) -}}
{{- fail "config.router.disaggregate is always, but the prefill pool may be empty; set it to auto, or keep a prefill worker" -}}
{{- end -}}
{{- if and $values.tls.clientCaSecretName (ne (include "twinpool.isPublicTls" .) "true") -}}
{{- fail "tls.clientCaSecretName asks clients for certificates, but the router's ports speak no TLS; set tls.secretName or tls.publicSecretName, and tls.public" -}}
{{- end -}}
{{- if and (eq $values.model.source "pvc") (not (and $values.model.pvc.claimName $values.model.pvc.path)) -}}
{{- fail "model.source is pvc: set model.pvc.claimName and model.pvc.path (the model's folder in the claim)" -}}
{{- end -}}
{{- if and (eq $values.model.source "s3") (not $values.model.s3.uri) -}}
{{- fail "model.source is s3: set model.s3.uri (s3://bucket/folder)" -}}
{{- end -}}
{{- if and (eq $values.model.source "hf") (not (dig "model" "path" "" $values.config)) -}}
{{- fail "model.source is hf: set config.model.path to a hub id (owner/name)" -}}
{{- end -}}
{{- end -}}
