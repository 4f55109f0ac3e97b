{{/* What the pods of operator, routers and tests have in common. */}}

{{/* The start of a pod's spec: (list . .Values.operator). */}}
{{- define "octavo.podSpec" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
enableServiceLinks: false # else a Service called like a setting would set it
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $root.Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Annotations of a pod that serves metrics: (list . .Values.router 8080). */}}
{{- define "octavo.podAnnotations" -}}
{{- $root := index . 0 -}}
{{- $own := dict -}}
{{- if $root.Values.monitoring.scrapeAnnotations -}}
{{- $own = dict "prometheus.io/scrape" "true" "prometheus.io/path" "/metrics" "prometheus.io/port" (index . 2 | toString) -}}
{{- if gt (len .) 3 }}{{ $_ := set $own "prometheus.io/scheme" (index . 3) }}{{ end -}}
{{- end -}}
{{- with merge (deepCopy (index . 1).podAnnotations) $own }}{{ toYaml . }}{{ end -}}
{{- end }}
