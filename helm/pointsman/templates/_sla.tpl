{{/* The values that the chart reads from the SLA file. `pointsman check` validates the file, not the chart. */}}

{{- define "pointsman.sla" -}}
{{- $file := fromYaml .Values.sla -}}
{{- with get $file "Error" }}{{ fail (printf "sla: not YAML: %s" .) }}{{ end -}}
{{- toJson $file -}}
{{- end -}}

{{/* Seconds of a duration such as 800ms, 12s, 15m, 1.5h. */}}
{{- define "pointsman.seconds" -}}
{{- $units := dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0 -}}
{{- $text := toString . -}}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)? *(ms|s|m|h)$" $text) }}{{ fail (printf "sla: %s is no duration" $text) }}{{ end -}}
{{- mulf (float64 (regexFind "^[0-9.]+" $text)) (float64 (get $units (regexFind "[a-z]+$" $text))) -}}
{{- end -}}

{{/* The router's drain time: server.drain, or 30 s. */}}
{{- define "pointsman.drainSeconds" -}}
{{- $server := default dict (get (include "pointsman.sla" . | fromJson) "server") -}}
{{- include "pointsman.seconds" (default "30s" (get $server "drain")) | float64 | ceil -}}
{{- end -}}

{{/* A checksum of the settings that the router reads only at its start: a change of these, and no other, replaces pods. */}}
{{- define "pointsman.fixedChecksum" -}}
{{- $file := include "pointsman.sla" . | fromJson -}}
{{- $server := default dict (get $file "server") -}}
{{- dict "pools" (get $file "pools") "store" (get $file "store") "server" (pick $server "http" "grpc" "admin" "picker" "keys_file" "max_body" "decision_log") | toJson | sha256sum -}}
{{- end -}}
