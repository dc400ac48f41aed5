{{/* The labels of this release's series, as the Prometheus operator sets them for the targets of a ServiceMonitor. */}}
{{- define "pointsman.series" -}}
namespace="{{ .Release.Namespace }}",service="{{ include "pointsman.fullname" . }}-router"
{{- end -}}

{{/*
The metrics by which a pool of shards is scaled, as a JSON list of {name, type, target, query}. Takes (list $ pool).

Misses and waits show that there are too few shards, but not that there are too many: without either, the pool would shrink to
its minimum and then miss again. Requests in flight per shard keep it at the size that its load needs, or with `needed` the number that the
routers compute. Each router sees its part of the load of the pool and of each shard, so each computes the number of the whole pool. Where it is
unknown (NaN, or no request since a start) the pool keeps its shards. Requests that wait for a pool that sleeps count too, and start it.
A comparison drops NaN (0/0 without requests), so that the query gives 0.
*/}}
{{- define "pointsman.scalingMetrics" -}}
{{- $series := include "pointsman.series" (index . 0) -}}
{{- $pool := index . 1 -}}
{{- $scaling := $pool.autoscaling -}}
{{- $ours := $series -}}
{{- with $scaling.classes }}{{ $ours = printf "%s,service_class=~\"%s\"" $series (join "|" .) }}{{ end -}}
{{- $misses := printf "sum(rate(pointsman_misses_total{%s}[2m])) or vector(0)" $ours -}}
{{- $queue := printf "(histogram_quantile(0.95, sum by (le) (rate(pointsman_queue_seconds_bucket{%s}[2m]))) >= 0) or vector(0)" $ours -}}
{{- $running := printf "(sum(pointsman_backend_in_flight{%s,backend=~\"%s-[0-9]+\"}) or vector(0))" $series $pool.name -}}
{{- $waiting := printf "(sum(pointsman_pool_waiting{%s,pool=\"%s\"}) or vector(0))" $series $pool.name -}}
{{- $flights := printf "%s + %s" $running $waiting -}}
{{- $needed := printf "((max(pointsman_pool_backends_needed{%s,pool=\"%s\"}) >= 0) or count(count by (backend) (pointsman_backend_healthy{%s,backend=~\"%s-[0-9]+\"} == 1)) or vector(0)) + clamp_max(%s, 1)" $series $pool.name $series $pool.name $waiting -}}
{{- list
  (dict "name" "pointsman_scaling_misses_per_second" "type" "Value" "target" $scaling.missesPerSecond "query" $misses)
  (dict "name" "pointsman_scaling_queue_seconds" "type" "Value" "target" $scaling.queueSeconds "query" $queue)
  (ternary
    (dict "name" "pointsman_scaling_backends_needed" "type" "AverageValue" "target" 1 "query" $needed)
    (dict "name" "pointsman_scaling_in_flight" "type" "AverageValue" "target" $scaling.inFlight "query" $flights)
    $scaling.needed)
  | toJson -}}
{{- end -}}

{{- define "pointsman.scalingBehavior" -}}
# a new shard starts with an empty cache, and a removed shard loses its cache: add quickly, remove slowly
scaleUp:
  stabilizationWindowSeconds: 30
  policies: [{type: Percent, value: 100, periodSeconds: 60}, {type: Pods, value: 2, periodSeconds: 60}]
scaleDown:
  stabilizationWindowSeconds: 900
  policies: [{type: Pods, value: 1, periodSeconds: 300}]
{{- end -}}

{{/*
A query by `backend`, with the label `pool` beside it: a backend is called POOL-NUMBER or POOL@ADDRESS, with /RANK behind that if it is a
data-parallel rank.
*/}}
{{- define "pointsman.withPool" -}}
label_replace(label_replace({{ . }}, "pool", "$1", "backend", "([^@]+)-[0-9]+(/[0-9]+)?"), "pool", "$1", "backend", "([^@]+)@.*")
{{- end -}}

{{/* Upper bounds of the router's histograms, as written in `le`. */}}
{{- define "pointsman.bounds" -}}
{{- dict
  "ttft" (list "0.005" "0.01" "0.025" "0.05" "0.1" "0.25" "0.5" "1.0" "2.5" "5.0" "10.0" "20.0" "30.0" "60.0" "120.0")
  "tpot" (list "0.001" "0.0025" "0.005" "0.01" "0.02" "0.03" "0.04" "0.06" "0.08" "0.1" "0.15" "0.25" "0.5" "1.0" "2.5" "10.0" "120.0")
  | toJson -}}
{{- end -}}

{{/*
The targets of all classes as a JSON list of {class, kind, key, said, budget, below, above, weight}: `kind` is ttft or tpot, `budget` the
share that may be late, `below` and `above` the bounds around the target, `weight` its position between them. A target beyond the
last bound is not visible in the metrics and is left out.
*/}}
{{- define "pointsman.targets" -}}
{{- $bounds := include "pointsman.bounds" . | fromJson -}}
{{- $targets := list -}}
{{- range $class, $said := default dict (get (include "pointsman.sla" . | fromJson) "classes") -}}
{{- range $key, $target := default dict $said -}}
{{- if regexMatch "^(ttft|tpot)_p[0-9]+$" $key -}}
{{- $kind := regexFind "^[a-z]+" $key -}}
{{- $seconds := include "pointsman.seconds" $target | float64 -}}
{{- $budget := divf (subf 100.0 (regexFind "[0-9]+$" $key | float64)) 100.0 -}}
{{- $below := "" -}}
{{- $above := "" -}}
{{- range get $bounds $kind -}}
{{- if lt (float64 .) $seconds }}{{ $below = . }}{{ else if not $above }}{{ $above = . }}{{ end -}}
{{- end -}}
{{- if $above -}}
{{- $from := float64 (default "0" $below) -}}
{{- $weight := divf (subf $seconds $from) (subf (float64 $above) $from) -}}
{{- $targets = append $targets (dict "class" $class "kind" $kind "key" $key "said" $target "budget" $budget "below" $below "above" $above "weight" $weight) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $targets -}}
{{- end -}}

{{/*
Share of first tokens (or of token times) later than a class's target, over a window. Takes (list $ target window).
Between two bounds the histogram is interpolated linearly, as in histogram_quantile.
*/}}
{{- define "pointsman.lateShare" -}}
{{- $target := index . 1 -}}
{{- $window := index . 2 -}}
{{- $series := printf "%s,service_class=%q" (include "pointsman.series" (index . 0)) $target.class -}}
{{- $metric := printf "pointsman_%s_seconds" $target.kind -}}
{{- $upper := printf "sum by (service_class) (rate(%s_bucket{%s,le=%q}[%s]))" $metric $series $target.above $window -}}
{{- $lower := printf "sum by (service_class) (rate(%s_bucket{%s,le=%q}[%s]))" $metric $series $target.below $window -}}
{{- $all := printf "sum by (service_class) (rate(%s_count{%s}[%s]))" $metric $series $window -}}
{{- $weight := round $target.weight 6 -}}
{{- if eq $weight 1.0 -}}
1 - {{ $upper }} / {{ $all }}
{{- else if $target.below -}}
1 - ({{ round (subf 1.0 $weight) 6 }} * {{ $lower }} + {{ $weight }} * {{ $upper }}) / {{ $all }}
{{- else -}}
1 - {{ $weight }} * {{ $upper }} / {{ $all }}
{{- end -}}
{{- end -}}

{{/*
Burn rates worth an alert, from Google's SRE workbook, chapter 5: of a budget for 30 days, 2 % in an hour or 5 % in six hours page,
10 % in a day or three days make a ticket. The short window ends the alert soon after the problem ends.
*/}}
{{- define "pointsman.burnRates" -}}
{{- list
  (dict "rate" 14.4 "long" "1h" "short" "5m" "for" "2m" "severity" "page")
  (dict "rate" 6.0 "long" "6h" "short" "30m" "for" "15m" "severity" "page")
  (dict "rate" 3.0 "long" "1d" "short" "2h" "for" "1h" "severity" "ticket")
  (dict "rate" 1.0 "long" "3d" "short" "6h" "for" "3h" "severity" "ticket")
  | toJson -}}
{{- end -}}

{{/* The URL of an alert's explanation. Takes (list $ alert). */}}
{{- define "pointsman.runbook" -}}
{{- with (index . 0).Values.monitoring.rules.runbook }}
runbook_url: {{ printf "%s#%s" . (lower (index $ 1)) | quote }}
{{- end }}
{{- end -}}
