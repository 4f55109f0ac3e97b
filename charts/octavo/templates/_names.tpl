{{/* Names, labels and images: the one place where they are formed. */}}

{{- define "octavo.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{- define "octavo.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "octavo.operator" -}}{{ include "octavo.fullname" . }}-operator{{- end }}
{{- define "octavo.router" -}}{{ include "octavo.fullname" . }}-router{{- end }}

{{/* Selects the pods of a component: (list . "router"). Immutable, so never more than this. */}}
{{- define "octavo.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "octavo.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Labels of an object of a component: (list . "router"). */}}
{{- define "octavo.labels" -}}
{{- $root := index . 0 -}}
{{ include "octavo.selector" . }}
app.kubernetes.io/part-of: octavo
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- with $root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Labels of its pods. No version of the chart: a new chart alone restarts nothing. */}}
{{- define "octavo.podLabels" -}}
{{- $root := index . 0 -}}
{{- $own := fromYaml (include "octavo.selector" .) -}}
{{- $_ := set $own "app.kubernetes.io/part-of" "octavo" -}}
{{ toYaml (mergeOverwrite (deepCopy $root.Values.commonLabels) (deepCopy (index . 2)) $own) }}
{{- end }}

{{/* The full name of an image: (list . .Values.router.image). */}}
{{- define "octavo.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $registry := coalesce $root.Values.global.imageRegistry $image.registry $root.Values.images.registry -}}
{{- $name := $image.repository -}}
{{- $host := first (splitList "/" $name) -}}
{{- if $registry -}}
{{- $name = printf "%s/%s" (trimSuffix "/" $registry) $name -}}
{{- else if not (or (eq $root.Values.images.pullPolicy "Never") (eq $host "localhost") (contains "." $host) (contains ":" $host)) -}}
{{- fail (printf "images.registry is not set, and nodes would pull %s from a public registry, where it is not ours: build the images (docs/images.md), push them, and set images.registry to where they are; or set images.pullPolicy to Never where all nodes have them" $name) -}}
{{- end -}}
{{- if $image.digest -}}
{{ $name }}@{{ $image.digest }}
{{- else -}}
{{ $name }}:{{ coalesce $image.tag $root.Values.images.tag $root.Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "octavo.operatorAccount" -}}
{{- $account := .Values.operator.serviceAccount -}}
{{- default (ternary (include "octavo.operator" .) "default" $account.create) $account.name -}}
{{- end }}

{{- define "octavo.routerAccount" -}}
{{- $account := .Values.router.serviceAccount -}}
{{- default (ternary (include "octavo.router" .) "default" $account.create) $account.name -}}
{{- end }}

{{/* The Secret with the token that opens routers' state to the operator. */}}
{{- define "octavo.stateSecret" -}}
{{- default (printf "%s-state" (include "octavo.router" .)) .Values.router.stateToken.existingSecret -}}
{{- end }}

{{/* The Secret with the authority of engines' certificates, and its key there. */}}
{{- define "octavo.engineCA" -}}
{{- $own := .Values.router.engineTLS -}}
{{- $tls := .Values.router.tls -}}
{{- if $own.existingSecret -}}
{{ toJson (dict "secret" $own.existingSecret "key" $own.caKey) }}
{{- else if and $tls.existingSecret $tls.caKey -}}
{{ toJson (dict "secret" $tls.existingSecret "key" $tls.caKey) }}
{{- else -}}
{{- fail "engines.tls.secretName has engines serve HTTPS, and routers need the authority of their certificates: set router.engineTLS.existingSecret" -}}
{{- end -}}
{{- end }}

{{- define "octavo.scheme" -}}{{ ternary "https" "http" (ne .Values.router.tls.existingSecret "") }}{{- end }}

{{/* In the certificates of routers: those that clients see, and those that engines see. */}}
{{- define "octavo.routerName" -}}{{ include "octavo.router" . }}.{{ .Release.Namespace }}.svc{{- end }}

{{/* Where pods of the cluster find the routers, without a path. */}}
{{- define "octavo.routerURL" -}}
{{ include "octavo.scheme" . }}://{{ include "octavo.router" . }}.{{ .Release.Namespace }}.svc:{{ .Values.router.service.port }}
{{- end }}
