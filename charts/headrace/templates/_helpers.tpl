{{/* Name of the operator's objects: the release's name, or release-headrace if it does not say headrace. */}}
{{- define "headrace.name" -}}
{{- if contains "headrace" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-headrace" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "headrace.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "headrace.name" .) -}}
{{- end -}}

{{- define "headrace.operatorImage" -}}
{{- .Values.operator.image | default (printf "headrace-operator:%s" .Chart.AppVersion) -}}
{{- end -}}

{{/*
What the operator may do: exactly what it calls. It must itself hold what it grants to routers (endpointslices).
*/}}
{{- define "headrace.rules" -}}
- apiGroups: [headrace.dev]
  resources: [disaggdeployments]
  verbs: [get, list, watch]
- apiGroups: [headrace.dev]
  resources: [disaggrolescalers]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [headrace.dev]
  resources: [disaggdeployments/status, disaggrolescalers/status]
  verbs: [patch]
# To own children with blockOwnerDeletion where the API server enforces the permission for it.
- apiGroups: [headrace.dev]
  resources: [disaggdeployments/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [pods, services, serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
# The readiness gate of leader pods.
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [controllerrevisions, deployments]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
# For spec.placement.computeDomain, where NVIDIA's DRA driver for GPUs serves it.
- apiGroups: [resource.nvidia.com]
  resources: [computedomains]
  verbs: [get, list, watch, create, patch, delete]
# For spec.placement.gang Native and Volcano. Kueue reads labels of pods.
- apiGroups: [scheduling.k8s.io]
  resources: [workloads]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch, delete]
{{- end -}}

{{/*
What it may do besides in the whole cluster, to look at nodes and at the room they have. Without it a lost node is
noticed later, and DisaggDeployments with spec.placement wait.
*/}}
{{- define "headrace.clusterRules" -}}
- apiGroups: [""]
  resources: [nodes]
  verbs: [get, list, watch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
{{- end -}}
