{{/* router.yaml: what the chart sets, with router.config laid over it. */}}
{{- define "octavo.routerConfig" -}}
{{- $router := .Values.router -}}
{{- $server := dict "host" "0.0.0.0" "log_format" "json" "log_level" $router.logLevel "access_log" $router.accessLog "drain_timeout_s" $router.drainSeconds "console" $router.console.enabled -}}
{{- if $router.tls.existingSecret -}}
{{- $_ := set $server "tls_cert" "/etc/octavo/tls/tls.crt" -}}
{{- $_ := set $server "tls_key" "/etc/octavo/tls/tls.key" -}}
{{- end -}}
{{- with $router.adminPort -}}
{{- $_ := set $server "admin_host" "0.0.0.0" -}}
{{- $_ := set $server "admin_port" (int .) -}}
{{- end -}}
{{- $namespaces := default (list "*") .Values.operator.watchNamespaces -}}
{{- $discovery := dict "kubernetes" (dict "enabled" true "namespaces" $namespaces) -}}
{{- if .Values.engines.tls.secretName }}{{ $_ := set $discovery "tls_ca" "/etc/octavo/engine-ca/ca.crt" }}{{ end -}}
{{- if and .Values.engines.tls.secretName $router.engineTLS.clientSecret -}}
{{- $_ := set $discovery "tls_cert" "/etc/octavo/engine-client/tls.crt" -}}
{{- $_ := set $discovery "tls_key" "/etc/octavo/engine-client/tls.key" -}}
{{- end -}}
{{- $flow := dict "hold_timeout_s" $router.holdSeconds -}}
{{- if $router.apiKeys.existingSecret -}}
{{- $_ := set $flow "keys_file" "/etc/octavo/keys/keys.yaml" -}}
{{- else -}}
{{- /* Without a token the operator, in another pod, could not read it. */ -}}
{{- $_ := set $server "open_state" true -}}
{{- end -}}
{{- $config := dict "server" $server "discovery" $discovery "flow" $flow -}}
{{- if $router.epp.enabled -}}
{{- $epp := dict "enabled" true "port" 9002 "fallbacks" $router.epp.fallbacks -}}
{{- if $router.epp.tlsSecret -}}
{{- $_ := set $epp "tls_cert" "/etc/octavo/epp-tls/tls.crt" -}}
{{- $_ := set $epp "tls_key" "/etc/octavo/epp-tls/tls.key" -}}
{{- end -}}
{{- $_ := set $config "epp" $epp -}}
{{- end -}}
{{- if $router.otlpEndpoint }}{{ $_ := set $config "tracing" (dict "endpoint" $router.otlpEndpoint) }}{{ end -}}
{{- toYaml (mergeOverwrite $config (deepCopy $router.config)) -}}
{{- end }}
