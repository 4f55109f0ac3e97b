{{/* Combinations of values that would not do what they seem to: they end the installation with a sentence. */}}

{{- define "octavo.checks" -}}
{{- $router := .Values.router -}}
{{- if and (not $router.apiKeys.existingSecret) (not $router.allowUnauthenticated) -}}
{{- if ne $router.service.type "ClusterIP" -}}
{{- fail (printf "router.service.type %s exposes routers to the outside, and they require no API keys: set router.apiKeys.existingSecret, or router.allowUnauthenticated if something in front asks" $router.service.type) -}}
{{- end -}}
{{- if or .Values.ingress.enabled .Values.httpRoute.enabled -}}
{{- fail "an Ingress or HTTPRoute exposes routers to the outside, and they require no API keys: set router.apiKeys.existingSecret, or router.allowUnauthenticated if something in front asks" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.monitoring.podMonitor .Values.monitoring.serviceMonitor -}}
{{- fail "monitoring.podMonitor and monitoring.serviceMonitor together would count everything twice: set one" -}}
{{- end -}}
{{- if and .Values.inferencePools (not $router.epp.enabled) -}}
{{- fail "inferencePools need router.epp.enabled: their endpoint picker is the router" -}}
{{- end -}}
{{- if and .Values.inferencePools .Values.engines.networkPolicy (not .Values.engines.clients) -}}
{{- fail "inferencePools have the gateway send requests to engines itself, and their NetworkPolicies would keep it out: say who it is in engines.clients, or set engines.networkPolicy to false" -}}
{{- end -}}
{{- $pool := .Values.httpRoute.inferencePool -}}
{{- if $pool -}}
{{- $names := list -}}
{{- range .Values.inferencePools }}{{ $names = append $names .name }}{{ end -}}
{{- if not (has $pool $names) -}}
{{- fail (printf "httpRoute.inferencePool %q is no name in inferencePools" $pool) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.inferencePools .Values.engines.tls.secretName -}}
{{- fail "inferencePools have the gateway send plain HTTP to engines, and with engines.tls.secretName they serve HTTPS: set one of the two" -}}
{{- end -}}
{{- if and .Values.engines.apiKey.secretName (not $router.engineKey.existingSecret) -}}
{{- fail "engines.apiKey.secretName has engines require a key that routers must show: set router.engineKey.existingSecret to a Secret with the same key in the namespace of the release" -}}
{{- end -}}
{{- if and .Values.engines.tls.clientCertificates (not .Values.engines.tls.secretName) -}}
{{- fail "engines.tls.clientCertificates needs TLS at the engines: set engines.tls.secretName" -}}
{{- end -}}
{{- if and .Values.engines.tls.clientCertificates (not $router.engineTLS.clientSecret) -}}
{{- fail "engines.tls.clientCertificates has engines require a certificate that routers must show: set router.engineTLS.clientSecret to a Secret of type kubernetes.io/tls in the namespace of the release" -}}
{{- end -}}
{{- if and .Values.generatedCertificates.enabled .Values.certManager.issuer.name -}}
{{- fail "generatedCertificates.enabled and certManager.issuer would both fill the same Secrets: set one of the two" -}}
{{- end -}}
{{- if and .Values.generatedCertificates.enabled (not $router.tls.existingSecret) (not .Values.engines.tls.secretName) -}}
{{- fail "generatedCertificates.enabled would make no certificate: name the Secrets that it shall fill in router.tls.existingSecret and engines.tls.secretName" -}}
{{- end -}}
{{- if and .Values.generatedCertificates.enabled .Values.engines.tls.secretName (not .Values.operator.watchNamespaces) -}}
{{- fail "generatedCertificates.enabled must know the namespaces whose engines need a certificate: set operator.watchNamespaces" -}}
{{- end -}}
{{- if and .Values.certManager.issuer.name (not $router.tls.existingSecret) (not .Values.engines.tls.secretName) -}}
{{- fail "certManager.issuer would make no certificate: name the Secrets that it shall fill in router.tls.existingSecret and engines.tls.secretName" -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs must name a Gateway" -}}
{{- end -}}
{{- if and $router.autoscaling.enabled (gt (int $router.autoscaling.minReplicas) (int $router.autoscaling.maxReplicas)) -}}
{{- fail "router.autoscaling.minReplicas is above maxReplicas" -}}
{{- end -}}
{{- if and .Values.operator.watchNamespaces (not (kindIs "slice" .Values.operator.watchNamespaces)) -}}
{{- fail "operator.watchNamespaces must be a list" -}}
{{- end -}}
{{- $server := default dict $router.config.server -}}
{{- if not (kindIs "map" $server) }}{{ fail "router.config.server must be a map" }}{{ end -}}
{{- if ne (int (default 8080 $server.port)) 8080 -}}
{{- fail "router.config.server.port must stay 8080, where the operator and engines' NetworkPolicies look for it: set router.service.port" -}}
{{- end -}}
{{- if gt (int (default 1 $server.workers)) 1 -}}
{{- fail "router.config.server.workers above 1 would hide all but one worker's state from the operator: set router.replicas" -}}
{{- end -}}
{{- if $server.state_token }}{{ fail "router.config.server.state_token would lie in a ConfigMap: set router.stateToken.existingSecret" }}{{ end -}}
{{- if or $server.admin_port $server.admin_host -}}
{{- fail "router.config.server.admin_port would take /metrics away from the port that is scraped: set router.adminPort" -}}
{{- end -}}
{{- $admin := int $router.adminPort -}}
{{- if and $admin (not $router.adminKey.existingSecret) -}}
{{- fail "router.adminPort is reached from other pods: set router.adminKey.existingSecret" -}}
{{- end -}}
{{- if or (eq $admin 8080) (and $router.epp.enabled (eq $admin 9002)) -}}
{{- fail (printf "router.adminPort %d is the port of something else: set router.adminPort to another one, such as 8081" $admin) -}}
{{- end -}}
{{- if $server.admin_key }}{{ fail "router.config.server.admin_key would lie in a ConfigMap: set router.adminKey.existingSecret" }}{{ end -}}
{{- $discovery := default dict $router.config.discovery -}}
{{- if and (kindIs "map" $discovery) $discovery.engine_key -}}
{{- fail "router.config.discovery.engine_key would lie in a ConfigMap: set router.engineKey.existingSecret" -}}
{{- end -}}
{{- end }}
