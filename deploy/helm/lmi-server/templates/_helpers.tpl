{{- define "lmi.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "lmi.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lmi.labels" -}}
{{ include "lmi.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "lmi.image" -}}
{{- $made := ternary "lmi-server-cuda" "lmi-server" (gt (int .Values.gpu.count) 0) }}
{{- printf "%s:%s" (.Values.image.repository | default $made) (.Values.image.tag | default .Chart.AppVersion) }}
{{- end }}

{{- /* The arguments of the container: NAME=SOURCE, or nothing for all that is in /opt/ml/model. */ -}}
{{- define "lmi.args" -}}
{{- $model := .Values.model }}
{{- $source := $model.id | default $model.s3.uri }}
{{- if $source }}{{ list "serve" (printf "%s=%s" ($model.name | default "model") $source) | toJson }}
{{- else if $model.name }}{{ list "serve" (printf "%s=/opt/ml/model" $model.name) | toJson }}
{{- else }}{{ list "serve" | toJson }}{{ end }}
{{- end }}

{{- define "lmi.cacheClaim" -}}
{{- .Values.cache.claimName | default (printf "%s-cache" (include "lmi.name" .)) }}
{{- end }}

{{- define "lmi.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "lmi.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- /* Name of the Secret with keys, or nothing. Argument: root, values of the keys, suffix. */ -}}
{{- define "lmi.keySecret" -}}
{{- if .values.secretName }}{{ .values.secretName }}
{{- else if .values.keys }}{{ include "lmi.name" .root }}-{{ .suffix }}{{ end }}
{{- end }}

{{- /* What single values cannot show. */ -}}
{{- define "lmi.check" -}}
{{- $model := .Values.model }}
{{- $sources := compact (list $model.id $model.s3.uri $model.pvc.claimName) }}
{{- if ne (len $sources) 1 }}
{{- fail (printf "set exactly one of model.id, model.s3.uri and model.pvc.claimName; %d are set" (len $sources)) }}
{{- end }}
{{- if and .Values.hpa.enabled .Values.keda.enabled }}
{{- fail "hpa.enabled and keda.enabled are both true; KEDA makes an autoscaler of its own: set one of them to false" }}
{{- end }}
{{- if .Values.keda.enabled }}
{{- if not .Values.keda.serverAddress }}
{{- fail "keda.enabled needs keda.serverAddress, the URL of Prometheus" }}
{{- end }}
{{- if and (eq (int .Values.keda.minReplicas) 0) (not .Values.keda.wakeQuery) }}
{{- fail "keda.minReplicas is 0 and keda.wakeQuery is not set: without a pod nothing reports a queue, so that no pod would ever start; give a query about the proxy in front" }}
{{- end }}
{{- end }}
{{- range $name := list "hpa" "keda" }}
{{- $scaler := index $.Values $name }}
{{- if and $scaler.enabled (lt (int $scaler.maxReplicas) (int $scaler.minReplicas)) }}
{{- fail (printf "%s.maxReplicas is below %s.minReplicas" $name $name) }}
{{- end }}
{{- end }}
{{- range $name := list "apiKeys" "managementKeys" }}
{{- $keys := index $.Values $name }}
{{- if and $keys.secretName $keys.keys }}
{{- fail (printf "set one of %s.keys and %s.secretName" $name $name) }}
{{- end }}
{{- end }}
{{- if and .Values.podMonitor.enabled (or .Values.managementKeys.keys .Values.managementKeys.secretName) (not .Values.podMonitor.secretName) }}
{{- fail "/metrics needs one of managementKeys: give Prometheus one in podMonitor.secretName" }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) }}
{{- fail "ingress.enabled needs a name in ingress.hosts" }}
{{- end }}
{{- range $key, $instead := dict "drain_timeout" "drainSeconds" "api_keys" "apiKeys" "api_keys_file" "apiKeys" "management_api_keys" "managementKeys" "management_api_keys_file" "managementKeys" "port" "service.port" }}
{{- if hasKey $.Values.settings $key }}
{{- fail (printf "settings.%s: the chart sets it; use %s" $key $instead) }}
{{- end }}
{{- end }}
{{- end }}
