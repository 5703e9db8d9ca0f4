{{/* Parts of the exporter's container that both modes share. */}}

{{/* Arguments of `serve` that both modes share. */}}
{{- define "kvcache-exporter.args" -}}
- serve
{{- if include "kvcache-exporter.configFile" . }}
- --config=/etc/kvcache-exporter/config/config.yaml
{{- end }}
- --listen-address=:{{ .Values.port }}
- --log-level={{ .Values.logLevel }}
{{- if .Values.webConfigSecret.name }}
- {{ printf "--web-config-file=/etc/kvcache-exporter/web-config/%s" .Values.webConfigSecret.key | quote }}
{{- end }}
{{- end -}}

{{/*
A probe of `path`, with the timings of `probe`. By plain HTTP whatever the web configuration says: the exporter answers its probes so on
an HTTPS port too, and the kubelet has no client certificate.
*/}}
{{- define "kvcache-exporter.probe" -}}
httpGet:
  path: {{ .path }}
  port: kvcache-metrics
{{ toYaml .probe }}
{{- end -}}

{{/* HTTP or HTTPS: what the exporter speaks. */}}
{{- define "kvcache-exporter.scheme" -}}
{{- ternary .Values.webConfigSecret.scheme "HTTP" (not (empty .Values.webConfigSecret.name)) -}}
{{- end -}}

{{/* Mounts of what `kvcache-exporter.volumes` yields; "" where there is nothing. */}}
{{- define "kvcache-exporter.volumeMounts" -}}
{{- if include "kvcache-exporter.configFile" . }}
- name: kvcache-exporter-config
  mountPath: /etc/kvcache-exporter/config
  readOnly: true
{{- end }}
{{- if .Values.modelConfigs }}
- name: kvcache-exporter-models
  mountPath: /etc/kvcache-exporter/models
  readOnly: true
{{- end }}
{{- if .Values.bearerTokenSecret.name }}
- name: kvcache-exporter-bearer-token
  mountPath: /etc/kvcache-exporter/bearer-token
  readOnly: true
{{- end }}
{{- if .Values.modelHub.tokenSecret.name }}
- name: kvcache-exporter-model-hub
  mountPath: /etc/kvcache-exporter/model-hub
  readOnly: true
{{- end }}
{{- if .Values.webConfigSecret.name }}
- name: kvcache-exporter-web-config
  mountPath: /etc/kvcache-exporter/web-config
  readOnly: true
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Volumes that the container mounts in both modes; "" where there are none. The prefix keeps them apart from the engine's. */}}
{{- define "kvcache-exporter.volumes" -}}
{{- $fullname := include "kvcache-exporter.fullname" . -}}
{{- if include "kvcache-exporter.configFile" . }}
- name: kvcache-exporter-config
  configMap:
    name: {{ $fullname | quote }}
{{- end }}
{{- if .Values.modelConfigs }}
- name: kvcache-exporter-models
  configMap:
    name: {{ printf "%s-models" $fullname | quote }}
    items:
      {{- range .Values.modelConfigs }}
      {{- $folder := include "kvcache-exporter.modelFolder" .model }}
      - key: {{ $folder }}.json
        path: {{ $folder }}/config.json
      {{- end }}
{{- end }}
{{- range $volume, $secret := dict "bearer-token" .Values.bearerTokenSecret "model-hub" .Values.modelHub.tokenSecret }}
{{- if $secret.name }}
- name: kvcache-exporter-{{ $volume }}
  secret:
    secretName: {{ $secret.name | quote }}
    items:
      - key: {{ $secret.key | quote }}
        path: token
{{- end }}
{{- end }}
{{- with .Values.webConfigSecret.name }}
- name: kvcache-exporter-web-config
  secret:
    secretName: {{ . | quote }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
