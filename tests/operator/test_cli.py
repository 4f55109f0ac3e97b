"""Flags and environment of the operator."""

from __future__ import annotations

import argparse

import pytest
import yaml

from octavo_operator.cli import add_options, read_settings, read_values
from octavo_operator.errors import SettingsInvalid


class TestFlags:
    def read(self, tmp_path, *argv: str, **environment: str):
        parser = argparse.ArgumentParser()
        add_options(parser)
        file = tmp_path / "config"
        file.write_text(
            yaml.safe_dump(
                {
                    "current-context": "a",
                    "contexts": [{"name": "a", "context": {"cluster": "c", "user": "u"}}],
                    "clusters": [{"name": "c", "cluster": {"server": "https://x"}}],
                    "users": [{"name": "u", "user": {"token": "t"}}],
                }
            )
        )
        args = parser.parse_args([*argv, f"--kubeconfig={file}"])
        return read_settings(read_values(args, environment), environment)

    def test_defaults(self, tmp_path):
        _, settings, run = self.read(tmp_path)
        assert settings.namespaces == ()
        assert (run.port, run.num_workers, run.resync_s) == (8090, 8, 300)
        assert run.lease is not None

    def test_a_flag_wins_over_the_environment(self, tmp_path):
        environment = {"OCTAVO_OPERATOR_NAMESPACES": "a,b", "OCTAVO_OPERATOR_WORKERS": "3"}
        _, settings, run = self.read(tmp_path, "--workers=4", **environment)
        assert settings.namespaces == ("a", "b")
        assert run.num_workers == 4

    def test_lists_are_separated_by_commas(self, tmp_path):
        _, settings, run = self.read(
            tmp_path, "--image-pull-secrets=one, two", "--deployment=octavo-operator"
        )
        assert settings.images.pull_secrets == ("one", "two")
        assert run.deployment == "octavo-operator"

    def test_variables_of_a_service_are_not_ours(self, tmp_path):
        environment = {
            "OCTAVO_OPERATOR_PORT": "tcp://10.0.0.1:8090",
            "OCTAVO_OPERATOR_SERVICE_HOST": "10.0.0.1",
            "OCTAVO_OPERATOR_PORT_8090_TCP": "tcp://10.0.0.1:8090",
        }
        assert self.read(tmp_path, **environment)[2].port == 8090

    @pytest.mark.parametrize(
        ("argv", "environment", "problem"),
        [
            (["--port=high"], {}, "--port must be a whole number from 0 to 65535; got high"),
            (["--readiness-gate=maybe"], {}, "--readiness-gate must be true or false"),
            (["--pull-policy=Often"], {}, "--pull-policy must be Always, IfNotPresent or Never"),
            (["--image-pull-secrets=A b"], {}, "must be names of Secrets; got A b"),
            (["--monitor-labels=a"], {}, "--monitor-labels must be key=value"),
            ([], {"OCTAVO_OPERATOR_NAMESPACE": "a"}, "no flag has that name"),
        ],
    )
    def test_mistakes_are_named(self, tmp_path, argv, environment, problem):
        with pytest.raises(SettingsInvalid, match=problem):
            self.read(tmp_path, *argv, **environment)
