"""Free memory as the kernel reports it, on a file tree like the kernel's."""

from octavo_engine.core.memory import free_memory

MIB = 2**20


def make_tree(root, files):
    for name, text in {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 1048576 kB\n",
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_limits_it_is_what_the_machine_has(tmp_path):
    assert free_memory(make_tree(tmp_path, {})) == 1024 * MIB


def test_a_containers_limit_counts_with_its_cache_given_back(tmp_path):
    tree = make_tree(tmp_path, {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{300 * MIB}\n",
        "sys/fs/cgroup/memory.current": f"{200 * MIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {50 * MIB}\n",
    })  # fmt: skip
    assert free_memory(tree) == 150 * MIB


def test_the_tightest_of_nested_groups_counts(tmp_path):
    tree = make_tree(tmp_path, {
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/memory.max": f"{100 * MIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{90 * MIB}\n",
        "sys/fs/cgroup/pod/box/memory.max": "max\n",
        "sys/fs/cgroup/pod/box/memory.current": f"{90 * MIB}\n",
    })  # fmt: skip
    assert free_memory(tree) == 10 * MIB


def test_the_older_hierarchy_counts_and_its_no_limit_is_none(tmp_path):
    group = "sys/fs/cgroup/memory"
    tree = make_tree(tmp_path, {
        "proc/self/cgroup": "9:cpu,cpuacct:/x\n8:memory:/box\n0::/\n",
        f"{group}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{group}/memory.usage_in_bytes": f"{MIB}\n",
        f"{group}/box/memory.limit_in_bytes": f"{80 * MIB}\n",
        f"{group}/box/memory.usage_in_bytes": f"{70 * MIB}\n",
        f"{group}/box/memory.stat": f"total_inactive_file {5 * MIB}\n",
    })  # fmt: skip
    assert free_memory(tree) == 15 * MIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path):
    tree = make_tree(tmp_path, {
        "sys/fs/cgroup/memory.max": "5\n", "sys/fs/cgroup/memory.current": "9\n",
    })  # fmt: skip
    assert free_memory(tree) == 0


def test_this_machine_has_some():
    assert free_memory() > MIB
