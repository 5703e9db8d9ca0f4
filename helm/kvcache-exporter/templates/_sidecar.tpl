{{/*
The exporter as a native sidecar, for the templates of other charts. Each template takes this chart's context, which a chart that has
it as a dependency reaches as `(index .Subcharts "kvcache-exporter")`.
*/}}

{{/*
One entry of a pod's initContainers: the exporter, beside the engine that listens on port sidecar.vllmPort of the same pod. It has no
startup and no readiness probe of its own unless asked for: the engine must neither wait for it nor lose its traffic with it.
*/}}
{{- define "kvcache-exporter.sidecar.container" -}}
{{- $uuids := join "," .Values.gpu.uuids -}}
name: kvcache-exporter
image: {{ include "kvcache-exporter.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
restartPolicy: Always
args:
  {{- include "kvcache-exporter.args" . | nindent 2 }}
  - --vllm-url=http://127.0.0.1:{{ .Values.sidecar.vllmPort }}
  - --target-name=$(POD_NAMESPACE)/$(POD_NAME)
  {{- with default (include "kvcache-exporter.modelSource" .) .Values.sidecar.modelConfig }}
  - {{ printf "--model-config=%s" . | quote }}
  {{- end }}
  {{- if .Values.modelHub.tokenSecret.name }}
  - --model-config-token-file=/etc/kvcache-exporter/model-hub/token
  {{- end }}
  {{- if .Values.bearerTokenSecret.name }}
  - --bearer-token-file=/etc/kvcache-exporter/bearer-token/token
  {{- end }}
  {{- if $uuids }}
  - --gpus={{ $uuids }}
  {{- else }}
  - --no-nvml
  {{- end }}
  {{- with .Values.extraArgs }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
env:
  - name: POD_NAMESPACE
    valueFrom:
      fieldRef:
        fieldPath: metadata.namespace
  - name: POD_NAME
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  - name: NVIDIA_VISIBLE_DEVICES
    value: {{ default "void" $uuids | quote }}
  {{- if $uuids }}
  - name: NVIDIA_DRIVER_CAPABILITIES
    value: {{ .Values.gpu.driverCapabilities | quote }}
  {{- end }}
  {{- with .Values.sidecar.engineArgs }}
  # Kubernetes takes $(…) for a variable; $$ is a dollar sign.
  - name: KVCACHE_EXPORTER_SERVE_ENGINE_ARGS
    value: {{ join "\n" . | replace "$" "$$" | quote }}
  {{- end }}
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - name: kvcache-metrics
    containerPort: {{ .Values.port }}
    protocol: TCP
{{- with .Values.sidecar.startupProbe }}
startupProbe:
  {{- include "kvcache-exporter.probe" (dict "path" "/healthz" "probe" .) | nindent 2 }}
{{- end }}
livenessProbe:
  {{- include "kvcache-exporter.probe" (dict "path" "/healthz" "probe" .Values.livenessProbe) | nindent 2 }}
{{- with .Values.sidecar.readinessProbe }}
readinessProbe:
  {{- include "kvcache-exporter.probe" (dict "path" "/readyz" "probe" .) | nindent 2 }}
{{- end }}
resources:
  {{- toYaml .Values.resources | nindent 2 }}
securityContext:
  {{- $context := deepCopy .Values.securityContext }}
  {{- if not (or (hasKey $context "runAsUser") (has .Values.sidecar.runAsUser (list nil ""))) }}
  {{- $_ := set $context "runAsUser" .Values.sidecar.runAsUser }}
  {{- end }}
  {{- toYaml $context | nindent 2 }}
{{- $model := .Values.sidecar.modelVolume }}
{{- $mounts := include "kvcache-exporter.volumeMounts" . | trim }}
{{- if or $mounts $model.name }}
volumeMounts:
  {{- with $mounts }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if $model.name }}
  - name: {{ $model.name }}
    mountPath: {{ $model.mountPath }}
    readOnly: true
  {{- end }}
{{- end }}
{{- end -}}

{{/* Entries of the pod's volumes that the sidecar needs; "" where it needs none. */}}
{{- define "kvcache-exporter.sidecar.volumes" -}}
{{- include "kvcache-exporter.volumes" . | trim -}}
{{- end -}}

{{/* Labels of the pod, by which the PodMonitor finds the sidecars of this release. */}}
{{- define "kvcache-exporter.sidecar.podLabels" -}}
kvcache-exporter.io/sidecar: "true"
kvcache-exporter.io/release: {{ .Release.Name | quote }}
{{- end -}}

{{/* Annotations of the pod, so that it is replaced when the sidecar's configuration changes. */}}
{{- define "kvcache-exporter.sidecar.podAnnotations" -}}
checksum/kvcache-exporter-config: {{ include "kvcache-exporter.checksum" . }}
{{- end -}}
