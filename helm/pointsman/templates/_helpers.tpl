{{/* Names. 25 characters, so that a StatefulSet keeps within 52: the API server adds a hash to that in a label. */}}
{{- define "pointsman.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 25 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 25 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 25 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The labels that select pods. Takes (list $ component). */}}
{{- define "pointsman.selector" -}}
app.kubernetes.io/name: {{ (index . 0).Chart.Name }}
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of every object. Takes (list $ component). */}}
{{- define "pointsman.labels" -}}
{{ include "pointsman.selector" . }}
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end -}}

{{/* An image by name. Takes (list $ image). */}}
{{- define "pointsman.image" -}}
{{- $image := index . 1 -}}
{{- printf "%s:%s" $image.repository (default (index . 0).Chart.AppVersion $image.tag) -}}
{{- end -}}

{{/* The security context of every pod: no token, no root, no privileges. Takes (list $ uid). */}}
{{- define "pointsman.podSecurity" -}}
{{- $root := index . 0 -}}
{{- $uid := index . 1 -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $root.Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ $uid }}
  runAsGroup: {{ $uid }}
  fsGroup: {{ $uid }}
  # a large model volume is not relabelled file by file on each start
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "pointsman.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The placement of a pod. Takes (list $ placement): `selector` as text, nodeSelector, tolerations, priorityClassName. */}}
{{- define "pointsman.placement" -}}
{{- $root := index . 0 -}}
{{- $placement := index . 1 -}}
{{- with $placement.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $placement.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $placement.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - topologyKey: {{ .key }}
    maxSkew: {{ .maxSkew }}
    whenUnsatisfiable: {{ .whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- $placement.selector | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* The Secret with Redis' URL, or nothing if there is no Redis. */}}
{{- define "pointsman.redisSecret" -}}
{{- if .Values.redis.existingSecret -}}
{{- .Values.redis.existingSecret -}}
{{- else if or .Values.redis.enabled .Values.redis.url -}}
{{- include "pointsman.fullname" . }}-redis
{{- end -}}
{{- end -}}
