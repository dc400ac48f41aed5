{{/* One pool of shards with its defaults, as JSON. Takes (list $ entry). Not mergeOverwrite: it treats 0 as missing. */}}
{{- define "pointsman.pool" -}}
{{- $pool := deepCopy (index . 0).Values.shardDefaults -}}
{{- range $key, $value := index . 1 -}}
{{- $usual := get $pool $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $usual) -}}
{{- range $inner, $said := $value }}{{ $_ := set $usual $inner $said }}{{ end -}}
{{- else -}}
{{- $_ := set $pool $key $value -}}
{{- end -}}
{{- end -}}
{{- toJson $pool -}}
{{- end -}}

{{/* The name of a pool's objects. Takes (list $ pool). */}}
{{- define "pointsman.shardName" -}}
{{- printf "%s-shard-%s" (include "pointsman.fullname" (index . 0)) (index . 1).name -}}
{{- end -}}

{{- define "pointsman.shardSelector" -}}
{{ include "pointsman.selector" (list (index . 0) "shard") }}
pointsman/pool: {{ (index . 1).name }}
{{- end -}}

{{/* The variable that ${env:...} names. Takes a pool. */}}
{{- define "pointsman.shardVariable" -}}
SHARDS_{{ .name | upper | replace "-" "_" }}
{{- end -}}

{{/* Every address that a shard of the pool may have. If the pool scales, shards that do not run yet count as unhealthy. */}}
{{- define "pointsman.shardAddresses" -}}
{{- $name := include "pointsman.shardName" . -}}
{{- $pool := index . 1 -}}
{{- $most := ternary $pool.replicas $pool.autoscaling.max (eq $pool.autoscaling.by "none") -}}
{{- range $number := until (int $most) -}}
{{- if $number }},{{ end }}{{ $name }}-{{ $number }}.{{ $name }}:7001
{{- end -}}
{{- end -}}

{{/* Command-line options, sorted by name; one for each item of a list. A number goes through JSON: Go prints a
million as 1e+06. */}}
{{- define "pointsman.shardOptions" -}}
{{- range $name, $value := . }}
{{- if and (kindIs "bool" $value) $value }}
- --{{ $name }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%s" $name . | quote }}
{{- end }}
{{- else if kindIs "string" $value }}
- {{ printf "--%s=%s" $name $value | quote }}
{{- else if not (kindIs "bool" $value) }}
- {{ printf "--%s=%s" $name (toJson $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A probe of a shard. It listens once its model is loaded; a kubelet has no certificate for more than to connect. */}}
{{- define "pointsman.shardProbe" -}}
{{- if .Values.tls.shards -}}
tcpSocket: {port: link}
{{- else -}}
grpc: {port: 7001}
{{- end -}}
{{- end -}}
