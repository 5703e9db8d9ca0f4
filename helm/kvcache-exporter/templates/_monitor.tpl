{{/* Parts that PodMonitor and ServiceMonitor share. */}}

{{/* The endpoint. Takes a dict with `root`, the chart's context, and `monitor`, the values of the monitor. */}}
{{- define "kvcache-exporter.endpoint" -}}
port: kvcache-metrics
path: /metrics
scheme: {{ include "kvcache-exporter.scheme" .root | lower }}
interval: {{ .monitor.interval }}
scrapeTimeout: {{ .monitor.scrapeTimeout }}
honorLabels: {{ .monitor.honorLabels }}
{{- with .monitor.tlsConfig }}
tlsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .monitor.basicAuth }}
basicAuth:
  {{- toYaml . | nindent 2 }}
{{- end }}
relabelings:
  # KVCacheExporterDown looks for kvcache-exporter in the job's name.
  - targetLabel: job
    replacement: kvcache-exporter
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: node
  {{- if eq .root.Values.mode "daemonset" }}
  # One exporter a node: its name says more than an address, and stays when the pod is replaced.
  - sourceLabels: [__meta_kubernetes_pod_node_name]
    targetLabel: instance
  {{- end }}
  {{- with .monitor.relabelings }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .monitor.metricRelabelings }}
metricRelabelings:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* A duration such as 1m30s in milliseconds. */}}
{{- define "kvcache-exporter.milliseconds" -}}
{{- $units := dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000 -}}
{{- $sum := 0 -}}
{{- range regexFindAll "[0-9]+(ms|s|m|h)" . -1 -}}
{{- $sum = add $sum (mul (regexFind "^[0-9]+" . | atoi) (get $units (regexFind "[a-z]+$" .))) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}
