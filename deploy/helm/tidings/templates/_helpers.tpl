{{- define "tidings.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "tidings.fullname" -}}
{{- $name := .Release.Name }}
{{- if not (contains (include "tidings.name" .) $name) }}{{ $name = printf "%s-%s" $name (include "tidings.name" .) }}{{ end }}
{{- .Values.fullnameOverride | default $name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "tidings.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "tidings.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{/*
The Deployments, each with its ops port: /healthz, /readyz, /metrics. Each runs the binary of its name, but the console runs
`api`, with the login of the API for its own requests and that of the role `system` for its pages.
serve runs `tidings serve`.
*/}}
{{- define "tidings.binaries" -}}
{{- if eq .Values.mode "serve" }}{"serve": 9180
{{- else }}{"api": 9181, "relay": 9182, "followercounts": 9183, "threadcache": 9184, "archiver": 9185
{{- end }}
{{- if .Values.console.enabled }}, "console": 9181{{ end }}}
{{- end }}

{{- define "tidings.labels" -}}
{{ include "tidings.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: tidings
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "tidings.selector" -}}
app.kubernetes.io/name: {{ include "tidings.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "tidings.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end }}
{{- end }}
{{- end }}

{{/*
The variables of the binary .name that hold connection strings. They come from existing Secrets.
followercounts and threadcache connect to the projections by their own logins, and to the truth as `verify`.
*/}}
{{- define "tidings.databases" -}}
{{- $postgres := .root.Values.postgres -}}
{{- $projector := has .name (list "followercounts" "threadcache") -}}
{{- $api := ternary "serve" "api" (eq .root.Values.mode "serve") -}}
{{- $login := ternary $api .name (eq .name "console") -}}
- name: DATABASE_URL
  valueFrom: {secretKeyRef: {name: {{ $postgres.secret }}, key: {{ $postgres.key | default (ternary "verify" $login $projector) }}}}
{{- with $postgres.projectionsSecret | default (ternary $postgres.secret "" $projector) }}
- name: PROJECTIONS_DATABASE_URL
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $postgres.key | default $login }}}}
{{- end }}
{{- if eq .name "console" }}
- name: CONSOLE_DATABASE_URL
  valueFrom: {secretKeyRef: {name: {{ $postgres.secret }}, key: {{ $postgres.key | default "console" }}}}
{{- with $postgres.projectionsSecret }}
- name: CONSOLE_PROJECTIONS_DATABASE_URL
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $postgres.key | default "console" }}}}
{{- end }}
{{- end }}
{{- end }}

{{/* What decides on which nodes a pod runs, and from where they pull the image. */}}
{{- define "tidings.placement" -}}
{{- range $field := list "imagePullSecrets" "priorityClassName" "nodeSelector" "affinity" "tolerations" }}
{{- with index $.Values $field }}
{{ $field }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tidings.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "tidings.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
