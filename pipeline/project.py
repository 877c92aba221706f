"""The package of the user's modules: a project's `utils.py` is `pipeline.project.utils`."""

from pipeline.system.imports import project_folders

__path__ = project_folders()
