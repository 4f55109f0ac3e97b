// chart-render renders a chart many times over in one process, as `helm template` would.
//
// Its argument is the chart's folder. Each line of the input is a JSON object with `values` and, if
// wanted, `release` and `namespace`. Each line of the output
// is {"files": {path: text}} or {"error": text}.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
)

type question struct {
	Values    map[string]any `json:"values"`
	Release   string         `json:"release"`
	Namespace string         `json:"namespace"`
}

type answer struct {
	Files map[string]string `json:"files,omitempty"`
	Error string            `json:"error,omitempty"`
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: chart-render CHART < questions")
		os.Exit(2)
	}
	// Loaded once: coalescing copies the chart's own values.
	loaded, err := loader.Load(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	out := json.NewEncoder(os.Stdout)
	in := bufio.NewScanner(os.Stdin)
	in.Buffer(nil, 1<<24)
	for in.Scan() {
		files, err := render(loaded, in.Bytes())
		reply := answer{Files: files}
		if err != nil {
			reply = answer{Error: err.Error()}
		}
		if err := out.Encode(reply); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}

func render(loaded *chart.Chart, line []byte) (map[string]string, error) {
	asked := question{Release: "octavo", Namespace: "octavo-system"}
	if err := json.Unmarshal(line, &asked); err != nil {
		return nil, err
	}
	release := chartutil.ReleaseOptions{
		Name: asked.Release, Namespace: asked.Namespace, IsInstall: true, Revision: 1,
	}
	values, err := chartutil.ToRenderValues(loaded, asked.Values, release, chartutil.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	return engine.Render(loaded, values)
}
