{{/* Alerts on parts, as YAML. A broken part is a ticket; an effect on callers is a page. */}}
{{- define "pointsman.partAlerts" -}}
{{- $series := include "pointsman.series" . -}}
{{- $refused := printf "pointsman_config_reloads_total{%s,result=\"refused\"}" $series -}}
{{- $failed := printf "pointsman_events_total{%s,event=\"task_failed\"}" $series -}}
{{- $ill := printf "(max by (backend) (pointsman_backend_healthy{%s}) == 0 and max by (backend) (max_over_time(pointsman_backend_healthy{%s}[1h])) == 1)" $series $series -}}
{{- $empty := printf "max by (pool) (pointsman_pool_backends_healthy{%s}) == 0" $series -}}
{{- $sleeps := printf "max by (pool) (pointsman_pool_may_sleep{%s}) == 1" $series -}}
{{- $asleep := printf "(%s and %s)" $empty $sleeps }}
- alert: PointsmanRouterDown
  expr: absent(up{ {{- $series -}} } == 1)
  for: 2m
  severity: page
  summary: no router is being scraped
- alert: PointsmanPoolDown
  # a pool that a request starts may be empty: see the next alert
  expr: {{ $empty }} unless {{ $sleeps }}
  for: 2m
  severity: page
  summary: "the pool {{ "{{ $labels.pool }}" }} has no healthy backend"
- alert: PointsmanPoolDoesNotStart
  expr: {{ $empty }} and sum by (pool) (pointsman_pool_waiting{ {{- $series -}} }) > 0
  for: 10m
  severity: page
  summary: "requests wait for the pool {{ "{{ $labels.pool }}" }}, and no backend of it has started for ten minutes"
- alert: PointsmanBackendIll
  # only backends that were healthy in the last hour: in a pool that scales, some addresses have no shard; and not while a pool sleeps
  expr: max by (backend) ({{ include "pointsman.withPool" $ill }} unless on (pool) {{ $asleep }})
  for: 5m
  severity: ticket
  summary: "{{ "{{ $labels.backend }}" }} gets no requests from any router"
- alert: PointsmanDiscoveryFails
  expr: max by (pool, source) (pointsman_discovery_well{ {{- $series -}} }) == 0
  for: 10m
  severity: ticket
  summary: "{{ "{{ $labels.source }}" }} of the pool {{ "{{ $labels.pool }}" }} does not answer any router: its last addresses stay in use"
- alert: PointsmanQueueStands
  expr: sum by (service_class) (pointsman_queued{ {{- $series -}} }) > 0 unless sum by (service_class) (rate(pointsman_queue_seconds_count{ {{- $series -}} }[5m])) > 0
  for: 5m
  severity: page
  summary: "{{ "{{ $value }}" }} requests of {{ "{{ $labels.service_class }}" }} wait, and none has been sent for minutes"
- alert: PointsmanEventLoopLate
  expr: histogram_quantile(0.99, sum by (pod, le) (rate(pointsman_event_loop_lag_seconds_bucket{ {{- $series -}} }[5m]))) > 0.1
  for: 10m
  severity: ticket
  summary: "{{ "{{ $labels.pod }}" }} has an event loop lag of {{ "{{ $value | humanizeDuration }}" }}: add routers"
- alert: PointsmanFileRefused
  # increase() misses the first count of a new counter, so a counter that has just appeared also fires
  expr: increase({{ $refused }}[15m]) > 0 or ({{ $refused }} unless {{ $refused }} offset 15m) > 0
  for: 5m
  severity: ticket
  summary: "{{ "{{ $labels.pod }}" }} rejected a changed SLA file; the old one stays in use"
- alert: PointsmanVersionsDiffer
  expr: count(count by (version) (pointsman_config_info{ {{- $series -}} } == 1)) > 1
  for: 10m
  severity: ticket
  summary: routers use different versions of the SLA file
- alert: PointsmanTaskFailed
  expr: increase({{ $failed }}[15m]) > 0 or ({{ $failed }} unless {{ $failed }} offset 15m) > 0
  for: 0m
  severity: ticket
  summary: "a task of {{ "{{ $labels.pod }}" }} failed and was restarted: a bug in Pointsman"
- alert: PointsmanPredictionsOff
  expr: histogram_quantile(0.5, sum by (backend, le) (rate(pointsman_ttft_prediction_error_bucket{ {{- $series -}} }[30m]))) > 0.5
  for: 30m
  severity: ticket
  summary: "half of the predictions for {{ "{{ $labels.backend }}" }} are off by more than {{ "{{ $value | humanizePercentage }}" }}"
{{- end -}}
