{{/* The sidecar as expressions in CEL, for the MutatingAdmissionPolicy that adds it to pods. */}}

{{/*
The API version of MutatingAdmissionPolicies. The group and version alone do not tell, since older clusters have them without this kind.
Where Helm asks no cluster, it does not know of v1/Pod either, and the version is the one that is there to stay.
*/}}
{{- define "kvcache-exporter.injection.apiVersion" -}}
{{- $group := "admissionregistration.k8s.io" -}}
{{- $apis := .Capabilities.APIVersions -}}
{{- if $apis.Has (printf "%s/v1/MutatingAdmissionPolicy" $group) -}}
{{- $group }}/v1
{{- else if $apis.Has (printf "%s/v1beta1/MutatingAdmissionPolicy" $group) -}}
{{- $group }}/v1beta1
{{- else if $apis.Has "v1/Pod" -}}
{{- fail "sidecar.injection needs MutatingAdmissionPolicy, which this cluster has not: it is there from Kubernetes 1.36 on, and in 1.34 and 1.35 where its feature gate and admissionregistration.k8s.io/v1beta1 are turned on" -}}
{{- else -}}
{{- $group }}/v1
{{- end -}}
{{- end -}}

{{/* Refuses values that hold for one engine, or live in the release's namespace only: the sidecar goes into many pods, in any namespace. */}}
{{- define "kvcache-exporter.injection.validate" -}}
{{- $annotations := dict
  "config" "config"
  "modelConfigs" "model-volume"
  "gpu.uuids" "visible-devices"
  "sidecar.engineArgs" "engine-args"
  "sidecar.modelVolume" "model-volume" -}}
{{- $set := dict
  "config" (include "kvcache-exporter.configFile" .)
  "modelConfigs" .Values.modelConfigs
  "gpu.uuids" .Values.gpu.uuids
  "sidecar.engineArgs" .Values.sidecar.engineArgs
  "sidecar.modelVolume" .Values.sidecar.modelVolume.name -}}
{{- range $name, $value := $set -}}
{{- if $value -}}
{{- fail (printf "%s is set, but sidecar.injection serves the pods of many engines; use the pods' annotation kvcache-exporter.io/%s" $name (get $annotations $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/*
A template of the sidecar, for a pod that is not known yet: what the pod's annotations say stands as «expression» in the values, and so
in what the template makes of them. Takes a dict with `root`, `template`, and what the pod's annotations have: `config`, `devices`.
*/}}
{{- define "kvcache-exporter.injection.include" -}}
{{- $values := deepCopy .root.Values -}}
{{- $_ := set $values.sidecar "vllmPort" "«variables.port»" -}}
{{- if .devices -}}
{{- $_ := set $values.gpu "uuids" (list "«variables.devices»") -}}
{{- end -}}
{{- if .config -}}
{{- /* Some file, and the name that its ConfigMap has. */ -}}
{{- $_ := set $values "config" (dict "targets" list) -}}
{{- $_ := set $values "fullnameOverride" "«variables.config»" -}}
{{- end -}}
{{- include .template (dict "Values" $values "Chart" .root.Chart "Release" .root.Release "Capabilities" .root.Capabilities) -}}
{{- end -}}

{{/*
A value as an expression: JSON, which CEL reads too, with each «expression» in a text added as it is. What is in a mapping or list is
wrapped in dyn(), since the API server refuses a literal whose values are of more than one type.
*/}}
{{- define "kvcache-exporter.injection.cel" -}}
{{- if kindIs "map" . -}}
{{- $entries := list -}}
{{- range $key, $value := . -}}
{{- $entries = append $entries (printf "%s: dyn(%s)" (toJson $key) (include "kvcache-exporter.injection.cel" $value)) -}}
{{- end -}}
{ {{- join ", " $entries -}} }
{{- else if kindIs "slice" . -}}
{{- $items := list -}}
{{- range . -}}
{{- $items = append $items (printf "dyn(%s)" (include "kvcache-exporter.injection.cel" .)) -}}
{{- end -}}
[ {{- join ", " $items -}} ]
{{- else if kindIs "string" . -}}
{{- $terms := list -}}
{{- range $index, $part := regexSplit "[«»]" . -1 -}}
{{- $terms = append $terms (ternary $part (toJson $part) (eq (mod $index 2) 1)) -}}
{{- end -}}
{{- join " + " (without $terms `""` | default (list `""`)) -}}
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{/* `condition ? yes : no` of two expressions, or one of them where both are the same. */}}
{{- define "kvcache-exporter.injection.either" -}}
{{- if eq .yes .no -}}
{{- .yes -}}
{{- else -}}
({{ .condition }} ? {{ .yes }} : {{ .no }})
{{- end -}}
{{- end -}}

{{/* The sidecar's container as an expression, each of its keys in a line: what the template yields, in the variant that the pod asks for. */}}
{{- define "kvcache-exporter.injection.container" -}}
{{- $template := "kvcache-exporter.sidecar.container" -}}
{{- $variants := dict
  "plain" (include "kvcache-exporter.injection.include" (dict "root" . "template" $template) | fromYaml)
  "devices" (include "kvcache-exporter.injection.include" (dict "root" . "template" $template "devices" true) | fromYaml)
  "config" (include "kvcache-exporter.injection.include" (dict "root" . "template" $template "config" true) | fromYaml)
  "both" (include "kvcache-exporter.injection.include" (dict "root" . "template" $template "config" true "devices" true) | fromYaml)
-}}
{{- $ofThePod := dict "env" "variables.engineArgs" "volumeMounts" "variables.modelMounts" -}}
{{- $entries := list -}}
{{- range $key, $_ := $variants.both -}}
{{- $cel := dict -}}
{{- range $variant, $container := $variants -}}
{{- $_ := set $cel $variant (include "kvcache-exporter.injection.cel" (default list (get $container $key))) -}}
{{- end -}}
{{- $hasDevices := `variables.devices != ""` -}}
{{- $with := include "kvcache-exporter.injection.either" (dict "condition" $hasDevices "yes" $cel.both "no" $cel.config) -}}
{{- $without := include "kvcache-exporter.injection.either" (dict "condition" $hasDevices "yes" $cel.devices "no" $cel.plain) -}}
{{- $value := include "kvcache-exporter.injection.either" (dict "condition" `variables.config != ""` "yes" $with "no" $without) -}}
{{- with get $ofThePod $key -}}
{{- $value = printf "%s + %s" $value . -}}
{{- end -}}
{{- $entries = append $entries (printf "  %s: dyn(%s)" (toJson $key) $value) -}}
{{- end -}}
{
{{ join ",\n" $entries }}
}
{{- end -}}

{{/* The volumes that the sidecar needs, as an expression. */}}
{{- define "kvcache-exporter.injection.volumes" -}}
{{- $template := "kvcache-exporter.sidecar.volumes" -}}
{{- $with := include "kvcache-exporter.injection.include" (dict "root" . "template" $template "config" true) | fromYamlArray -}}
{{- $without := include "kvcache-exporter.injection.include" (dict "root" . "template" $template) | fromYamlArray -}}
{{- include "kvcache-exporter.injection.either" (dict
  "condition" `variables.config != ""`
  "yes" (include "kvcache-exporter.injection.cel" $with)
  "no" (include "kvcache-exporter.injection.cel" $without)) -}}
{{- end -}}
