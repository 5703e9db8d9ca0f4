{{/*
What the schema cannot say: combinations of values that would be half obeyed are refused, each with one sentence that says what to do.
*/}}
{{- define "kvcache-exporter.validate" -}}
{{- $sidecar := eq .Values.mode "sidecar" -}}
{{- $config := .Values.config -}}

{{- if and .Values.podMonitor.enabled .Values.serviceMonitor.enabled -}}
{{- fail "podMonitor.enabled and serviceMonitor.enabled are both true: every pod would be scraped twice and every alert fire twice; keep one of them" -}}
{{- end -}}
{{- range $name := list "podMonitor" "serviceMonitor" -}}
{{- $monitor := get $.Values $name -}}
{{- if gt (include "kvcache-exporter.milliseconds" $monitor.scrapeTimeout | int64) (include "kvcache-exporter.milliseconds" $monitor.interval | int64) -}}
{{- fail (printf "%s.scrapeTimeout %s is longer than %s.interval %s; Prometheus refuses that" $name $monitor.scrapeTimeout $name $monitor.interval) -}}
{{- end -}}
{{- end -}}
{{- /* A cluster tells the kinds that it has, Helm's own list only groups: without kinds, no cluster was asked. */ -}}
{{- if and .Values.checkMonitoringCrds (.Capabilities.APIVersions.Has "v1/Pod") (not (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
{{- range $name := list "podMonitor" "serviceMonitor" "prometheusRule" -}}
{{- if (get $.Values $name).enabled -}}
{{- fail (printf "%s.enabled is true, but this cluster has no monitoring.coreos.com/v1: install the Prometheus operator (kube-prometheus-stack) first, turn %s off, or set checkMonitoringCrds to false" $name $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- if hasKey $config "listen_address" -}}
{{- fail "config.listen_address is set: the Service, probes and monitors go by `port`; set that instead" -}}
{{- end -}}
{{- range $key := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" -}}
{{- range $where := list "commonLabels" "podLabels" -}}
{{- if hasKey (get $.Values $where) $key -}}
{{- fail (printf "%s has %s, which pods are selected by and which cannot be changed; use nameOverride, or another label" $where $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $models := list -}}
{{- range .Values.modelConfigs -}}
{{- if has .model $models -}}
{{- fail (printf "modelConfigs has %s twice; keep one" .model) -}}
{{- end -}}
{{- $models = append $models .model -}}
{{- end -}}
{{- if and .Values.gpu.uuids (not .Values.gpu.enabled) -}}
{{- fail "gpu.uuids is set and gpu.enabled is false; drop one of them" -}}
{{- end -}}

{{- if $sidecar -}}
{{- if $config.kubernetes -}}
{{- fail "config.kubernetes is set, but a sidecar watches the engine of its own pod and never uses the API; remove it, or use mode daemonset" -}}
{{- end -}}
{{- if or .Values.serviceMonitor.enabled .Values.service.enabled -}}
{{- fail "service and serviceMonitor are for mode daemonset; use podMonitor, which finds the engines' pods wherever they are" -}}
{{- end -}}
{{- if .Values.podResources.enabled -}}
{{- fail "podResources is for mode daemonset: a sidecar is told its GPUs by gpu.uuids" -}}
{{- end -}}
{{- if .Values.hostPID -}}
{{- fail "hostPID is for mode daemonset: a sidecar sees the processes of its own pod at most" -}}
{{- end -}}
{{- if or .Values.models.hostPath .Values.models.existingClaim -}}
{{- fail "models is for mode daemonset; a sidecar mounts a volume of its pod: sidecar.modelVolume" -}}
{{- end -}}
{{- if and .Values.sidecar.modelVolume.name (not .Values.sidecar.modelVolume.mountPath) -}}
{{- fail "sidecar.modelVolume.name is set without mountPath; give the path under which the engine sees its model" -}}
{{- end -}}
{{- if .Values.runtimeClassName -}}
{{- fail "runtimeClassName is for mode daemonset; a sidecar runs with that of the engine's pod" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not .Values.networkPolicy.extraIngress) -}}
{{- fail "networkPolicy.enabled in mode sidecar covers the engines' pods: list in networkPolicy.extraIngress who reaches their other ports, or they are cut off" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled .Values.networkPolicy.egress.enabled -}}
{{- fail "networkPolicy.egress in mode sidecar would cut the engines' pods off; it is for mode daemonset" -}}
{{- end -}}
{{- else -}}
{{- if not (or $config.targets (include "kvcache-exporter.discovery" .)) -}}
{{- fail "there is nothing to watch: drop `config.kubernetes: false`, or list engines in config.targets" -}}
{{- end -}}
{{- if .Values.gpu.uuids -}}
{{- fail "gpu.uuids is for mode sidecar: the DaemonSet's pods see all GPUs of their node; config.gpus says which to show" -}}
{{- end -}}
{{- if .Values.sidecar.injection.enabled -}}
{{- fail "sidecar.injection is for mode sidecar: with the DaemonSet too, every engine would be watched twice" -}}
{{- end -}}
{{- if and .Values.models.hostPath .Values.models.existingClaim -}}
{{- fail "models.hostPath and models.existingClaim are both set; keep one of them" -}}
{{- end -}}
{{- end -}}
{{- end -}}
