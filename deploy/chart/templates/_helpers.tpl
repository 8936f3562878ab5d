{{/* Names and values shared by several templates. */}}

{{- define "dendro.labels" -}}
app.kubernetes.io/name: dendroaspis
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "dendro.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}

{{- define "dendro.redisUrl" -}}
{{ .Values.redis.url | default (printf "redis://%s-redis:6379" .Release.Name) }}
{{- end }}

{{/* The longest request, from the configuration or its default. */}}
{{- define "dendro.requestSeconds" -}}
{{ dig "router" "request_timeout_s" 600 .Values.cluster | int }}
{{- end }}

{{/* Seconds for which Ray lets a pod drain that is stopped: all but the last ones of its grace period. */}}
{{- define "dendro.drainSeconds" -}}
{{ sub (int .Values.drain.gracePeriodSeconds) 15 }}
{{- end }}

{{/* Fails if pods would be stopped before their requests have ended. */}}
{{- define "dendro.checkDrain" -}}
{{- $request := include "dendro.requestSeconds" . | int }}
{{- $needed := add $request 60 }}
{{- if lt (int .Values.drain.gracePeriodSeconds) (int $needed) }}
{{- fail (printf "drain.gracePeriodSeconds: %d; requests may take %d s and replicas wait 30 s more, so at least %d" (int .Values.drain.gracePeriodSeconds) $request (int $needed)) }}
{{- end }}
{{- $drain := dig "router" "drain_s" 20 .Values.cluster }}
{{- if gt (float64 $drain) (include "dendro.drainSeconds" . | float64) }}
{{- fail (printf "cluster.router.drain_s: %v; with this drain.gracePeriodSeconds at most %s" $drain (include "dendro.drainSeconds" .)) }}
{{- end }}
{{- if lt (int .Values.drain.oldClusterSeconds) $request }}
{{- fail (printf "drain.oldClusterSeconds: %d; requests may take %d s" (int .Values.drain.oldClusterSeconds) $request) }}
{{- end }}
{{- end }}

{{/* Fails if a pool's pods cannot hold all replicas of its models: those left over would wait for a pod for ever. Without an
     autoscaler a pool has minPods. */}}
{{- define "dendro.checkPools" -}}
{{- $root := . }}
{{- $sections := dict "verifier" "targets" "drafter" "drafters" "router" "router" }}
{{- range $pool, $section := $sections }}
{{- $pods := get $root.Values.pools $pool }}
{{- $models := get $root.Values.cluster $section | default dict }}
{{- if eq $pool "router" }}{{ $models = dict "" $models }}{{ end }}
{{- if gt (int $pods.minPods) (int $pods.maxPods) }}
{{- fail (printf "pools.%s.minPods: is %d, above maxPods, %d" $pool (int $pods.minPods) (int $pods.maxPods)) }}
{{- end }}
{{- if and (eq $pool "router") (gt (int $pods.slots) 1) }}
{{- fail (printf "pools.router.slots: is %d; a pod has one router, as its probe and its monitoring read one status port" (int $pods.slots)) }}
{{- end }}
{{- $bound := ternary "maxPods" "minPods" $root.Values.autoscaler.enabled }}{{ $count := get $pods $bound | int }}
{{- $needed := 0 }}{{ $gpus := 0.0 }}
{{- range $name, $model := $models }}
{{- $path := ternary (printf "cluster.%s.%s" $section $name) "cluster.router" (ne $name "") }}
{{- $replicas := dig "replicas" 1 $model | int }}
{{- with $model.autoscaling }}{{ $replicas = dig "max_replicas" 1 . | int }}{{ end }}
{{- $size := dig "tensor_parallel" 1 $model | int }}
{{- $gpu := mulf (float64 $size) (dig "resources" "gpu" 0 $model | float64) }}
{{- if or (gt $size (int $pods.slots)) (gt $gpu (float64 $pods.gpus)) }}
{{- fail (printf "%s: a replica takes %d slots and %v GPUs; a pod of pools.%s has %d and %d" $path $size $gpu $pool (int $pods.slots) (int $pods.gpus)) }}
{{- end }}
{{- $most := mul (div (int $pods.slots) (max 1 $size)) $count }}
{{- if gt $replicas (int $most) }}
{{- fail (printf "%s: has up to %d replicas; pools.%s holds %d: %d pods with %d slots, %d a replica" $path $replicas $pool $most $count (int $pods.slots) $size) }}
{{- end }}
{{- $needed = add $needed (mul $replicas $size) }}
{{- $gpus = addf $gpus (mulf (float64 $replicas) $gpu) }}
{{- end }}
{{- $slots := mul (int $pods.slots) $count }}
{{- $has := mul (int $pods.gpus) $count }}
{{- if or (gt $needed $slots) (gt $gpus (float64 $has)) }}
{{- fail (printf "cluster.%s: all replicas take %d slots and %v GPUs; pools.%s.%s: %d pods have %d and %d" $section $needed $gpus $pool $bound $count $slots $has) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Port of a pod's Ray metrics. KubeRay's default is that of the routers' HTTP API. */}}
{{- define "dendro.metricsPort" -}}8081{{- end }}

{{/* Fails if two of the ports are equal, or one is that of Ray or of Serve's HTTP proxy. */}}
{{- define "dendro.checkPorts" -}}
{{- $taken := dict "8000" "that of Serve's HTTP proxy" (include "dendro.metricsPort" .) "that of Ray's metrics" "52365" "that of Ray's agent" }}
{{- range $port := untilStep 10002 20000 1 }}{{ $_ := set $taken (toString $port) "one of Ray's workers" }}{{ end }}
{{- $grpc := .Values.grpc }}
{{- range $number := until (include "dendro.mostSlots" . | int) }}
{{- $port := add $grpc.replicaStatusPort $number | toString }}
{{- if hasKey $taken $port }}{{ fail (printf "grpc.replicaStatusPort: replica %d of a pod has %s, as %s is; set another port" $number $port (get $taken $port)) }}{{ end }}
{{- end }}
{{- $ports := dict "grpc.port" $grpc.port "grpc.statusPort" $grpc.statusPort "grpc.replicaStatusPort" $grpc.replicaStatusPort "http.port" .Values.http.port }}
{{- range $field, $number := $ports }}
{{- $port := $number | int | toString }}
{{- if hasKey $taken $port }}{{ fail (printf "%s: is %s, as %s is; set another port" $field $port (get $taken $port)) }}{{ end }}
{{- $_ := set $taken $port $field }}
{{- end }}
{{- end }}

{{/* The cluster's configuration, with Redis, the ports and each model's pool filled in. */}}
{{- define "dendro.cluster" -}}
{{- $config := deepCopy .Values.cluster }}
{{- if hasKey $config "grpc" }}{{ fail "cluster.grpc: is filled in from the value grpc" }}{{ end }}
{{- if hasKey $config "http" }}{{ fail "cluster.http: is filled in from the value http" }}{{ end }}
{{- if and .Values.keys.existingSecret .Values.keys.open }}{{ fail "keys.open: is true beside keys.existingSecret" }}{{ end }}
{{- if .Values.tls.gateways }}
{{- if or .Values.keys.existingSecret .Values.keys.open }}{{ fail "tls.gateways: is true beside keys" }}{{ end }}
{{- if not .Values.tls.clients }}{{ fail "tls.clients: name a secret, as gateways call over TLS" }}{{ end }}
{{- else if not (or .Values.keys.existingSecret .Values.keys.open) }}
{{- fail "keys.existingSecret: name the secret with the file that `dendro keys` writes, or set keys.open" }}
{{- end }}
{{- if not $config.targets }}{{ fail "cluster.targets: name at least one target" }}{{ end }}
{{- range $section, $pool := dict "targets" "verifier" "drafters" "drafter" }}
{{- range $name, $model := get $config $section }}
{{- $resources := mergeOverwrite (dict) ($model.resources | default dict) (dict "custom" (dict $pool 1)) }}
{{- $_ := set $model "resources" $resources }}
{{- end }}
{{- end }}
{{- $router := $config.router | default dict }}
{{- $_ := set $router "resources" (mergeOverwrite (dict "cpu" 0.25) ($router.resources | default dict) (dict "custom" (dict "router" 1))) }}
{{- $_ := set $config "router" $router }}
{{- range $key := list "drafters" "speculation" "structures" "verification_modes" "trace" }}
{{- if not (get $config $key) }}{{ $_ := unset $config $key }}{{ end }}
{{- end }}
{{- $redis := mergeOverwrite (dict) ($config.redis | default dict) (dict "url" (include "dendro.redisUrl" .)) }}
{{- if .Values.redis.existingSecret }}{{ $_ := set $redis "password_variable" "DENDRO_REDIS_PASSWORD" }}{{ end }}
{{- if and (or .Values.redis.user .Values.redis.authoritySecret) (not .Values.redis.url) }}
{{- fail "redis.url: name your server, as the chart's own has neither users nor TLS" }}
{{- end }}
{{- with .Values.redis.user }}{{ $_ := set $redis "user" . }}{{ end }}
{{- if .Values.redis.authoritySecret }}{{ $_ := set $redis "authority" (include "dendro.redisAuthority" .) }}{{ end }}
{{- $_ := set $config "redis" $redis }}
{{- $_ := set $config "grpc" (dict "host" "0.0.0.0" "port" (int .Values.grpc.port) "status_port" (int .Values.grpc.statusPort) "replica_status_port" (int .Values.grpc.replicaStatusPort)) }}
{{- $_ := set $config "http" (dict "host" "0.0.0.0" "port" (int .Values.http.port)) }}
{{- if not .Values.tls.gateways }}
{{- $_ := set $config "auth" (ternary "none" (dict "keys" (printf "/etc/dendro/keys/%s" .Values.keys.secretKey)) .Values.keys.open) }}
{{- end }}
{{- $tls := dict }}
{{- if .Values.tls.clients }}{{ $_ := set $tls "clients" (include "dendro.certificate" "clients" | fromYaml) }}{{ end }}
{{- if .Values.tls.gateways }}{{ $_ := set $tls.clients "gateways" "/etc/dendro/tls-clients/ca.crt" }}{{ end }}
{{- if include "dendro.peers" . }}
{{- $peer := include "dendro.certificate" "peers" | fromYaml }}
{{- $_ := set $tls "peers" (dict "authority" "/etc/dendro/tls-peers/ca.crt" "router" $peer "drafter" $peer "verifier" $peer) }}
{{- end }}
{{- if $tls }}{{ $_ := set $config "tls" $tls }}{{ end }}
{{- toYaml $config }}
{{- end }}

{{/* The files of a certificate, where they are mounted. */}}
{{- define "dendro.certificate" -}}
{certificate: /etc/dendro/tls-{{ . }}/tls.crt, key: /etc/dendro/tls-{{ . }}/tls.key}
{{- end }}

{{/* The file of the authority of Redis' certificate, where it is mounted. */}}
{{- define "dendro.redisAuthority" -}}
/etc/dendro/redis/{{ .Values.redis.authorityKey }}
{{- end }}

{{/* "true" if the secrets of the peers are named, empty if none is. Fails if some are. */}}
{{- define "dendro.peers" -}}
{{- $named := compact (values .Values.tls.peers) }}
{{- if and $named (ne (len $named) 3) }}{{ fail "tls.peers: name the secrets of router, drafter and verifier, or none" }}{{ end }}
{{- if $named }}true{{ end }}
{{- end }}

{{/* The most replicas of one pod, each of which has a status port. */}}
{{- define "dendro.mostSlots" -}}
{{- max (int .Values.pools.verifier.slots) (int .Values.pools.drafter.slots) }}
{{- end }}

{{/* The environment of Ray's and Serve's processes. */}}
{{- define "dendro.env" -}}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S, value: "1"}
- {name: RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S, value: "3"}
- {name: RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS, value: "1"}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: RAY_worker_niceness, value: "0"}
- {name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO, value: "0"}
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ include "dendro.drainSeconds" . | quote }}}
{{- if .Values.redis.existingSecret }}
- name: DENDRO_REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ .Values.redis.existingSecret }}, key: {{ .Values.redis.secretKey }}}
{{- end }}
{{- if .Values.redis.authoritySecret }}
- {name: RAY_REDIS_CA_CERT, value: {{ include "dendro.redisAuthority" . | quote }}}
{{- end }}
{{- if .Values.hub.endpoint }}
- {name: HF_ENDPOINT, value: {{ .Values.hub.endpoint | quote }}}
{{- end }}
{{- if .Values.hub.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef: {name: {{ .Values.hub.existingSecret }}, key: {{ .Values.hub.secretKey }}}
{{- end }}
{{- end }}

{{- define "dendro.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{- define "dendro.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.podSecurity.runAsUser }}
runAsGroup: {{ .Values.podSecurity.runAsGroup }}
fsGroup: {{ .Values.podSecurity.fsGroup }}
seccompProfile: {type: RuntimeDefault}
{{- end }}
