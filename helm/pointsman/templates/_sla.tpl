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

{{/* How the SLA file secures one of the router's ports: nothing, `server` for TLS, `mutual` if clients need a certificate. Takes (list $ port). */}}
{{- define "pointsman.portTls" -}}
{{- $server := default dict (get (include "pointsman.sla" (index . 0) | fromJson) "server") -}}
{{- $tls := get $server "tls" -}}
{{- if $tls -}}
{{- $ports := default dict (get $tls "ports") -}}
{{- $own := get $ports (index . 1) -}}
{{- if or (not (hasKey $ports (index . 1))) (kindIs "map" $own) -}}
{{- $own = default dict $own -}}
{{- ternary "mutual" "server" (or (hasKey $own "client_ca") (hasKey $tls "client_ca")) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A probe of the router's HTTP port at a path. A kubelet has no certificate: where clients need one it only connects. Takes (list $ path). */}}
{{- define "pointsman.routerProbe" -}}
{{- $tls := include "pointsman.portTls" (list (index . 0) "http") -}}
{{- if eq $tls "mutual" -}}
tcpSocket: {port: http}
{{- else if $tls -}}
httpGet: {path: {{ index . 1 }}, port: http, scheme: HTTPS}
{{- else -}}
httpGet: {path: {{ index . 1 }}, port: http}
{{- end -}}
{{- end -}}

{{/* The application protocol of a gRPC port in a Service: HTTP/2, with TLS or without. Takes (list $ port). */}}
{{- define "pointsman.grpcProtocol" -}}
{{- ternary "https" "kubernetes.io/h2c" (ne "" (include "pointsman.portTls" .)) -}}
{{- end -}}

{{/* The volume of a Secret with certificates, and its mount. Take the Secret's name. */}}
{{- define "pointsman.tlsVolume" -}}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end -}}

{{- define "pointsman.tlsMount" -}}
- {name: tls, mountPath: /run/tls, readOnly: true}
{{- end -}}

{{/* A checksum of the settings that the router reads only at its start: a change of these, and no other, replaces pods. */}}
{{- define "pointsman.fixedChecksum" -}}
{{- $file := include "pointsman.sla" . | fromJson -}}
{{- $server := default dict (get $file "server") -}}
{{- $batches := default dict (get $file "batches") -}}
{{- dict "store" (get $file "store") "usage" (get $file "usage") "audit" (get $file "audit") "batches" (pick $batches "store" "s3") "server" (pick $server "http" "grpc" "admin" "picker" "metrics" "keys_file" "state" "max_body" "decision_log" "tls") | toJson | sha256sum -}}
{{- end -}}
