{{/* The exporter's configuration file, and the config.json files of models. */}}

{{/* "true" where the engines are found through the API, else "". That is so unless config.kubernetes is false or null. */}}
{{- define "kvcache-exporter.discovery" -}}
{{- $off := and (hasKey .Values.config "kubernetes") (has .Values.config.kubernetes (list false nil)) -}}
{{- if and (eq .Values.mode "daemonset") (not $off) -}}true{{- end -}}
{{- end -}}

{{/* config.kubernetes as a mapping, whatever stands there. */}}
{{- define "kvcache-exporter.kubernetes" -}}
{{- if kindIs "map" .Values.config.kubernetes -}}
{{- toYaml .Values.config.kubernetes -}}
{{- end -}}
{{- end -}}

{{/*
config.yaml, or "" where there is none. It is `config` of the values, with the paths of what the chart mounts where the user names no
other.
*/}}
{{- define "kvcache-exporter.configFile" -}}
{{- $config := omit (deepCopy .Values.config) "kubernetes" -}}
{{- if and (hasKey $config "targets") .Values.modelConfigs -}}
{{- range $config.targets -}}
{{- if not (or (hasKey . "model_config") (hasKey . "kv_cache_bytes_per_token")) -}}
{{- $_ := set . "model_config" "/etc/kvcache-exporter/models" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if include "kvcache-exporter.discovery" . -}}
{{- $kubernetes := include "kvcache-exporter.kubernetes" . | fromYaml -}}
{{- with include "kvcache-exporter.modelSource" . -}}
{{- $_ := set $kubernetes "model_config" (default . $kubernetes.model_config) -}}
{{- end -}}
{{- if and .Values.modelHub.tokenSecret.name (not $kubernetes.model_config_token_file) -}}
{{- $_ := set $kubernetes "model_config_token_file" "/etc/kvcache-exporter/model-hub/token" -}}
{{- end -}}
{{- if and .Values.bearerTokenSecret.name (not $kubernetes.bearer_token_file) -}}
{{- $_ := set $kubernetes "bearer_token_file" "/etc/kvcache-exporter/bearer-token/token" -}}
{{- end -}}
{{- $_ := set $config "kubernetes" $kubernetes -}}
{{- end -}}
{{- if and .Values.podResources.enabled (not $config.pod_resources_socket) -}}
{{- $_ := set $config "pod_resources_socket" (printf "%s/kubelet.sock" (trimSuffix "/" .Values.podResources.hostPath)) -}}
{{- end -}}
{{- if $config -}}
{{- toYaml $config -}}
{{- end -}}
{{- end -}}

{{/* Where config.json of engines is that nothing else tells; "" for nowhere but the engine's own path. */}}
{{- define "kvcache-exporter.modelSource" -}}
{{- ternary "/etc/kvcache-exporter/models" .Values.modelHub.url (not (empty .Values.modelConfigs)) -}}
{{- end -}}

{{/* Name of a model's folder in a Hugging Face cache, where the exporter looks for it. Takes the model's name. */}}
{{- define "kvcache-exporter.modelFolder" -}}
models--{{ replace "/" "--" . }}
{{- end -}}

{{/* Data of the ConfigMap with the models' config.json files. */}}
{{- define "kvcache-exporter.modelFiles" -}}
{{- range .Values.modelConfigs }}
{{ include "kvcache-exporter.modelFolder" .model }}.json: {{ ternary .config (toPrettyJson .config) (kindIs "string" .config) | quote }}
{{- end }}
{{- end -}}

{{/* Changes with the configuration, so that pods are replaced when it does. */}}
{{- define "kvcache-exporter.checksum" -}}
{{- printf "%s\n%s" (include "kvcache-exporter.configFile" .) (include "kvcache-exporter.modelFiles" .) | sha256sum -}}
{{- end -}}
