{{- define "kibotos.labels" -}}
app.kubernetes.io/name: kibotos
app.kubernetes.io/part-of: kibotos
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "kibotos.selector" -}}
app.kubernetes.io/name: kibotos
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kibotos.env" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}
