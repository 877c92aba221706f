"""An example of an overlay: Prometheus, KEDA, and Ingress annotations of one cluster."""

from __future__ import annotations

from pathlib import Path

COMPONENT = "apiVersion: kustomize.config.k8s.io/v1alpha1\nkind: Component\n"
MONITORED = """\
resources: [monitor.yaml, scaler.yaml]
patches:
  - path: no-autoscaler.yaml
"""
FILES = {
    "monitor.yaml": """\
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata: {name: twice, labels: {release: prometheus}}
spec:
  selector: {matchLabels: {app.kubernetes.io/name: twice, app.kubernetes.io/component: serving}}
  endpoints: [{port: http, path: /metrics, interval: 15s}]
""",
    "scaler.yaml": """\
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata: {name: twice}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: twice}
  minReplicaCount: 1
  maxReplicaCount: 6
  triggers: [{type: prometheus, metadata: {serverAddress: "http://p:9090", query: sum(x), threshold: "8"}}]
""",
    "no-autoscaler.yaml": """\
$patch: delete
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: twice}
""",
}


def write_overlay(folder: Path, text: str = MONITORED) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in {**FILES, "kustomization.yaml": COMPONENT + text}.items():
        (folder / name).write_text(content)
    return folder
