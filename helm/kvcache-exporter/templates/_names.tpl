{{/* Names, labels and the image: what all objects share. */}}

{{- define "kvcache-exporter.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvcache-exporter.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "kvcache-exporter.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Name of objects that belong to no namespace: releases of one name in two namespaces must not share them. */}}
{{- define "kvcache-exporter.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "kvcache-exporter.fullname" .) -}}
{{- end -}}

{{- define "kvcache-exporter.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvcache-exporter.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/*
Labels that select pods. A DaemonSet's selector can never be changed, so nothing that a version or a user changes may be in here.
*/}}
{{- define "kvcache-exporter.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvcache-exporter.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: exporter
{{- end -}}

{{/* Labels of objects. */}}
{{- define "kvcache-exporter.labels" -}}
{{- $own := fromYaml (include "kvcache-exporter.selectorLabels" .) -}}
{{- $_ := set $own "app.kubernetes.io/version" .Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .Release.Service -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-") -}}
{{- include "kvcache-exporter.strings" (merge $own .Values.commonLabels) -}}
{{- end -}}

{{/*
Metadata of an object: name, namespace, labels, annotations. Takes a dict with `root`, the chart's context, and optionally `name`,
`namespace`, `labels` and `annotations`.
*/}}
{{- define "kvcache-exporter.metadata" -}}
name: {{ default (include "kvcache-exporter.fullname" .root) .name | quote }}
namespace: {{ default .root.Release.Namespace .namespace | quote }}
{{ include "kvcache-exporter.metadataLabels" . }}
{{- end -}}

{{/* Labels and annotations alone, of objects that belong to no namespace. */}}
{{- define "kvcache-exporter.metadataLabels" -}}
labels:
  {{- $own := fromYaml (include "kvcache-exporter.labels" .root) }}
  {{- include "kvcache-exporter.strings" (merge $own (default dict .labels)) | nindent 2 }}
{{- with merge (dict) (default dict .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- include "kvcache-exporter.strings" . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A mapping with every value as text: Kubernetes refuses labels and annotations that are numbers or booleans. */}}
{{- define "kvcache-exporter.strings" -}}
{{- $texts := dict -}}
{{- range $key, $value := . -}}
{{- $_ := set $texts $key (include "kvcache-exporter.string" $value) -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

{{/* A scalar as text. Helm reads numbers as floats, and would print a million as 1e+06. */}}
{{- define "kvcache-exporter.string" -}}
{{- if and (kindIs "float64" .) (eq . (float64 (int64 .))) -}}
{{- int64 . -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{- define "kvcache-exporter.image" -}}
{{- .Values.image.repository -}}:{{- default .Chart.AppVersion .Values.image.tag -}}
{{- with .Values.image.digest -}}@{{- . -}}{{- end -}}
{{- end -}}
