// Package test renders the chart with Helm's engine and decodes every object as strictly as the
// Kubernetes API does.
package test

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	"helm.sh/helm/v4/pkg/chart/v2/lint"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	apps "k8s.io/api/apps/v1"
	autoscaling "k8s.io/api/autoscaling/v2"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	policy "k8s.io/api/policy/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"
)

// TestMain discards the log: Helm logs a line for each file of the chart that is a link.
func TestMain(m *testing.M) {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

const release = "shop"

// chartPath is the folder of the chart, or the packaged chart of a release.
var chartPath, chartVersion = cmp.Or(os.Getenv("CHART"), "../tidings"), cmp.Or(os.Getenv("CHART_VERSION"), "0.1.0")

var binaries = []string{"api", "relay", "followercounts", "threadcache", "archiver"}

// objects has the objects of one rendering, by kind.
type objects struct {
	deployments   map[string]*apps.Deployment // by component
	jobs          []*batch.Job
	services      []*core.Service
	configMaps    []*core.ConfigMap
	accounts      []*core.ServiceAccount
	budgets       []*policy.PodDisruptionBudget
	scalers       []*autoscaling.HorizontalPodAutoscaler
	networks      []*networking.NetworkPolicy
	monitors      []*monitoring.ServiceMonitor
	rules         []*monitoring.PrometheusRule
	ingresses     []*networking.Ingress
	tests         []*core.Pod
	metas         []meta.ObjectMeta
	notes, source string
}

// try renders the chart as a fleet, unless values says otherwise. values override the chart's own
// values.
func try(values map[string]any) (*objects, error) {
	if values == nil {
		values = map[string]any{}
	}
	if values["mode"] == nil {
		values["mode"] = "fleet"
	}
	chart, err := loader.Load(chartPath)
	if err != nil {
		return nil, err
	}
	all, err := util.ToRenderValues(chart, values, common.ReleaseOptions{Name: release, Namespace: "social", IsInstall: true, Revision: 1},
		common.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	files, err := engine.Engine{Strict: true}.Render(chart, all)
	if err != nil {
		return nil, err
	}
	o := &objects{deployments: map[string]*apps.Deployment{}}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if strings.HasSuffix(name, "NOTES.txt") {
			o.notes = files[name]
			continue
		}
		o.source += files[name]
		for doc := range strings.SplitSeq("\n"+files[name], "\n---") {
			if strings.TrimSpace(doc) == "" {
				continue
			}
			if err := o.add([]byte(doc)); err != nil {
				return nil, fmt.Errorf("%s: %w\n%s", name, err, doc)
			}
		}
	}
	return o, nil
}

func decode[T any](doc []byte, to *[]*T) (*T, error) {
	v := new(T)
	*to = append(*to, v)
	return v, yaml.UnmarshalStrict(doc, v)
}

func (o *objects) add(doc []byte) error {
	var head struct {
		meta.TypeMeta `json:",inline"`
		Metadata      meta.ObjectMeta `json:"metadata"`
	}
	if err := yaml.Unmarshal(doc, &head); err != nil {
		return err
	}
	o.metas = append(o.metas, head.Metadata)
	var err error
	switch head.APIVersion + "/" + head.Kind {
	case "apps/v1/Deployment":
		d := new(apps.Deployment)
		err = yaml.UnmarshalStrict(doc, d)
		o.deployments[d.Labels["app.kubernetes.io/component"]] = d
	case "batch/v1/Job":
		_, err = decode(doc, &o.jobs)
	case "v1/Service":
		_, err = decode(doc, &o.services)
	case "v1/ConfigMap":
		_, err = decode(doc, &o.configMaps)
	case "v1/ServiceAccount":
		_, err = decode(doc, &o.accounts)
	case "networking.k8s.io/v1/Ingress":
		_, err = decode(doc, &o.ingresses)
	case "v1/Pod":
		_, err = decode(doc, &o.tests)
	case "policy/v1/PodDisruptionBudget":
		_, err = decode(doc, &o.budgets)
	case "autoscaling/v2/HorizontalPodAutoscaler":
		_, err = decode(doc, &o.scalers)
	case "networking.k8s.io/v1/NetworkPolicy":
		_, err = decode(doc, &o.networks)
	case "monitoring.coreos.com/v1/ServiceMonitor":
		_, err = decode(doc, &o.monitors)
	case "monitoring.coreos.com/v1/PrometheusRule":
		_, err = decode(doc, &o.rules)
	default:
		err = fmt.Errorf("unexpected %s %s", head.APIVersion, head.Kind)
	}
	return err
}

func render(t *testing.T, values map[string]any) *objects {
	t.Helper()
	o, err := try(values)
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// values parses YAML.
func values(t *testing.T, s string) map[string]any {
	t.Helper()
	var v map[string]any
	if err := yaml.Unmarshal([]byte(s), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// everything has values that enable every part of the chart.
const everything = `
partitions: 4
image: {repository: registry.example/tidings, digest: "sha256:` + "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef" + `"}
imagePullSecrets: [{name: registry}]
postgres: {secret: truth, projectionsSecret: projections}
nats: {url: "tls://nats-0:4222,tls://nats-1:4222", placementTags: ["disk:ssd", "zone:a"], credentialsSecret: nats-users, caSecret: nats-ca}
env: {LOG_LEVEL: debug}
api: {tlsSecret: api-tls, autoscaling: {enabled: true}, env: {API_MAX_REQUESTS: "256"}}
relay: {autoscaling: {enabled: true}}
followercounts: {autoscaling: {enabled: true, minReplicas: 1, maxReplicas: 3}}
threadcache: {autoscaling: {enabled: true}}
archiver: {autoscaling: {enabled: true}, envFromSecrets: [bucket]}
podAnnotations: {team: social}
nodeSelector: {disk: ssd}
tolerations: [{key: dedicated, operator: Exists}]
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms: [{matchExpressions: [{key: gpu, operator: DoesNotExist}]}]
ingress: {enabled: true, className: nginx, host: api.example.com, tlsSecret: edge-tls, annotations: {team: social}}
priorityClassName: high
networkPolicy:
  apiFrom: [{namespaceSelector: {matchLabels: {name: edge}}}]
  opsFrom: [{podSelector: {}}]
  extraEgress: [{ports: [{port: 4318, protocol: TCP}]}]
monitoring: {serviceMonitor: {enabled: true, labels: {release: prometheus}}, prometheusRule: {enabled: true}, dashboards: {enabled: true}}
`

// podsOf returns all pod templates by component.
func (o *objects) podsOf() map[string]core.PodTemplateSpec {
	pods := map[string]core.PodTemplateSpec{}
	for name, d := range o.deployments {
		pods[name] = d.Spec.Template
	}
	for _, j := range o.jobs {
		pods[j.Labels["app.kubernetes.io/component"]] = j.Spec.Template
	}
	return pods
}

func eachRendering(t *testing.T, check func(t *testing.T, o *objects)) {
	for name, v := range map[string]string{"the chart's own values": "", "everything": everything} {
		t.Run(name, func(t *testing.T) { check(t, render(t, values(t, v))) })
	}
}

func TestEveryBinaryHasItsObjects(t *testing.T) {
	eachRendering(t, func(t *testing.T, o *objects) {
		for _, name := range binaries {
			d := o.deployments[name]
			if d == nil {
				t.Fatalf("no Deployment of %s", name)
			}
			if got := d.Spec.Template.Spec.Containers[0].Command; len(got) != 1 || got[0] != "/bin/"+name {
				t.Errorf("%s runs %v", name, got)
			}
			matching(t, o, name, labels.Set(d.Spec.Template.Labels))
		}
		if len(o.deployments) != len(binaries) || len(o.jobs) != 1 {
			t.Errorf("%d deployments and %d jobs", len(o.deployments), len(o.jobs))
		}
	})
}

// TestTheConsoleHasAServiceOfItsOwn: its pods are not those of the API, and only the peers of
// networkPolicy.consoleFrom may open it.
func TestTheConsoleHasAServiceOfItsOwn(t *testing.T) {
	for _, v := range []string{"console: {enabled: true}", everything + "console: {enabled: true, tlsSecret: console-tls}"} {
		o := render(t, values(t, v))
		d := o.deployments["console"]
		if d == nil || len(o.deployments) != len(binaries)+1 {
			t.Fatalf("%d deployments, and of the console: %v", len(o.deployments), d)
		}
		matching(t, o, "console", labels.Set(d.Spec.Template.Labels))
		for _, name := range binaries {
			matching(t, o, name, labels.Set(o.deployments[name].Spec.Template.Labels))
			if variable(o.deployments[name], "CONSOLE") != "" {
				t.Errorf("%s serves the console", name)
			}
		}
		c := d.Spec.Template.Spec.Containers[0]
		if c.Command[0] != "/bin/api" || variable(d, "CONSOLE") != "true" || variable(d, "CONSOLE_ADDR") != ":8081" ||
			variable(d, "API_ADDR") != "127.0.0.1:8080" {
			t.Errorf("%v with %v", c.Command, c.Env)
		}
		truth := values(t, v)["postgres"]
		want := map[string]string{"DATABASE_URL": "tidings-postgres/api", "CONSOLE_DATABASE_URL": "tidings-postgres/console"}
		if truth != nil {
			want = map[string]string{"DATABASE_URL": "truth/api", "CONSOLE_DATABASE_URL": "truth/console",
				"PROJECTIONS_DATABASE_URL": "projections/api", "CONSOLE_PROJECTIONS_DATABASE_URL": "projections/console"}
		}
		got := map[string]string{}
		for _, e := range c.Env {
			if strings.HasSuffix(e.Name, "DATABASE_URL") {
				got[e.Name] = e.ValueFrom.SecretKeyRef.Name + "/" + e.ValueFrom.SecretKeyRef.Key
			}
		}
		if !maps.Equal(got, want) {
			t.Errorf("logins %v, want %v", got, want)
		}
		for _, s := range o.services {
			if s.Labels["app.kubernetes.io/component"] == "console" &&
				(s.Spec.Ports[0].Port != 8081 || s.Spec.Ports[0].TargetPort.StrVal != "http") {
				t.Errorf("the service of the console has the ports %+v", s.Spec.Ports)
			}
		}
		for _, n := range o.networks {
			if n.Labels["app.kubernetes.io/component"] == "console" &&
				(len(n.Spec.Ingress) != 1 || n.Spec.Ingress[0].Ports[0].Port.StrVal != "ops") {
				t.Errorf("strangers may open the console: %+v", n.Spec.Ingress)
			}
		}
	}
	o := render(t, values(t, `{console: {enabled: true}, networkPolicy: {consoleFrom: [{podSelector: {matchLabels: {app: desk}}}]}}`))
	for _, n := range o.networks {
		if n.Labels["app.kubernetes.io/component"] == "console" && (len(n.Spec.Ingress) != 2 ||
			n.Spec.Ingress[0].From[0].PodSelector.MatchLabels["app"] != "desk" || n.Spec.Ingress[0].Ports[0].Port.StrVal != "http") {
			t.Errorf("who may open the console: %+v", n.Spec.Ingress)
		}
	}
	if !strings.Contains(o.notes, "port-forward service/shop-tidings-console 8081") {
		t.Errorf("the notes do not name the console:\n%s", o.notes)
	}
}

// matching checks that exactly one Deployment, Service, disruption budget and network policy
// selects the pods of a component.
func matching(t *testing.T, o *objects, name string, pod labels.Set) {
	t.Helper()
	for what, n := range map[string]int{
		"deployment": count(slices.Collect(maps.Values(o.deployments)),
			func(d *apps.Deployment) bool { return selects(t, d.Spec.Selector, pod) }),
		"service": count(o.services, func(s *core.Service) bool { return labels.SelectorFromSet(s.Spec.Selector).Matches(pod) }),
		"budget":  count(o.budgets, func(b *policy.PodDisruptionBudget) bool { return selects(t, b.Spec.Selector, pod) }),
		"network": count(o.networks, func(n *networking.NetworkPolicy) bool { return selects(t, &n.Spec.PodSelector, pod) }),
	} {
		if n != 1 {
			t.Errorf("%d of kind %s select the pods of %s, want 1", n, what, name)
		}
	}
}

func count[T any](all []T, is func(T) bool) (n int) {
	for _, v := range all {
		if is(v) {
			n++
		}
	}
	return n
}

func selects(t *testing.T, s *meta.LabelSelector, pod labels.Set) bool {
	t.Helper()
	selector, err := meta.LabelSelectorAsSelector(s)
	if err != nil {
		t.Fatal(err)
	}
	return !selector.Empty() && selector.Matches(pod)
}

// TestPodsAreRestricted checks the fields that the profile "restricted" of Pod Security requires,
// and the resource limits.
func TestPodsAreRestricted(t *testing.T) {
	eachRendering(t, func(t *testing.T, o *objects) {
		for name, pod := range o.podsOf() {
			spec := pod.Spec
			if p := spec.SecurityContext; p == nil || !*p.RunAsNonRoot || *p.RunAsUser == 0 ||
				p.SeccompProfile.Type != core.SeccompProfileTypeRuntimeDefault {
				t.Errorf("%s: pod security %+v", name, p)
			}
			if spec.AutomountServiceAccountToken == nil || *spec.AutomountServiceAccountToken {
				t.Errorf("%s gets a token of the Kubernetes API", name)
			}
			for _, c := range spec.Containers {
				s := c.SecurityContext
				if s == nil || !*s.ReadOnlyRootFilesystem || *s.AllowPrivilegeEscalation ||
					!slices.Equal(s.Capabilities.Drop, []core.Capability{"ALL"}) || s.Capabilities.Add != nil {
					t.Errorf("%s: security context %+v", name, s)
				}
				if c.Resources.Limits.Memory().IsZero() || c.Resources.Requests.Memory().IsZero() || c.Resources.Requests.Cpu().IsZero() {
					t.Errorf("%s: resources %+v", name, c.Resources)
				}
				for _, m := range c.VolumeMounts {
					if !m.ReadOnly {
						t.Errorf("%s can write to %s", name, m.MountPath)
					}
				}
			}
		}
	})
}

// documented returns the variables of docs/configuration.md and their defaults.
func documented(t *testing.T) map[string]string {
	t.Helper()
	page, err := os.ReadFile("../../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]string{}
	for _, m := range regexp.MustCompile("(?m)^\\| `([A-Z0-9_]+)` \\|[ `]*([^|`]*)[ `]*\\|").FindAllSubmatch(page, -1) {
		known[string(m[1])] = strings.TrimSpace(string(m[2]))
	}
	if len(known) < 40 {
		t.Fatalf("docs/configuration.md has %d variables", len(known))
	}
	return known
}

var secret = regexp.MustCompile(`DATABASE_URL$|PASSWORD|TOKEN|SECRET|CURSOR_KEY$`)

func TestVariablesAreDocumentedAndSecretsStayInSecrets(t *testing.T) {
	known := documented(t)
	eachRendering(t, func(t *testing.T, o *objects) {
		check := func(where, name, value string) {
			if _, ok := known[name]; !ok {
				t.Errorf("%s sets %s, which docs/configuration.md lacks", where, name)
			}
			if value != "" && secret.MatchString(name) {
				t.Errorf("%s has the secret %s in plain text", where, name)
			}
		}
		for name, pod := range o.podsOf() {
			seen := map[string]bool{}
			for _, c := range pod.Spec.Containers {
				for _, e := range c.Env {
					check(name, e.Name, e.Value)
					if seen[e.Name] {
						t.Errorf("%s sets %s twice", name, e.Name)
					}
					seen[e.Name] = true
				}
			}
			if !seen["DATABASE_URL"] {
				t.Errorf("%s has no DATABASE_URL", name)
			}
		}
		for _, c := range o.configMaps {
			if strings.Contains(c.Name, "-dashboard-") {
				continue
			}
			for name, value := range c.Data {
				check("the ConfigMap", name, value)
			}
		}
	})
}

// TestEveryBinaryHasItsOwnLogins checks the Secrets and keys of the connection strings. The logins
// of followercounts and threadcache can read only projections, so these two compare with the truth
// through the login verify.
func TestEveryBinaryHasItsOwnLogins(t *testing.T) {
	for name, c := range map[string]struct {
		values string
		want   map[string][2]string // by component: SECRET/KEY of the truth and of the projections
	}{
		"one database": {"", map[string][2]string{
			"api": {"tidings-postgres/api"}, "relay": {"tidings-postgres/relay"}, "archiver": {"tidings-postgres/archiver"},
			"migrate":        {"tidings-postgres/migrate"},
			"followercounts": {"tidings-postgres/verify", "tidings-postgres/followercounts"},
			"threadcache":    {"tidings-postgres/verify", "tidings-postgres/threadcache"},
		}},
		"two databases": {"postgres: {secret: truth, projectionsSecret: projections}", map[string][2]string{
			"api": {"truth/api", "projections/api"}, "relay": {"truth/relay", "projections/relay"},
			"archiver": {"truth/archiver", "projections/archiver"},
			"migrate":  {"truth/migrate", "projections/migrate"}, "followercounts": {"truth/verify", "projections/followercounts"},
			"threadcache": {"truth/verify", "projections/threadcache"},
		}},
		"one key for a trial": {"postgres: {secret: all, key: url}", map[string][2]string{
			"api": {"all/url"}, "relay": {"all/url"}, "archiver": {"all/url"}, "migrate": {"all/url"},
			"followercounts": {"all/url", "all/url"}, "threadcache": {"all/url", "all/url"},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			got := map[string][2]string{}
			for component, pod := range render(t, values(t, c.values)).podsOf() {
				var logins [2]string
				for _, e := range pod.Spec.Containers[0].Env {
					if i := slices.Index([]string{"DATABASE_URL", "PROJECTIONS_DATABASE_URL"}, e.Name); i >= 0 {
						logins[i] = e.ValueFrom.SecretKeyRef.Name + "/" + e.ValueFrom.SecretKeyRef.Key
					}
				}
				got[component] = logins
			}
			if !maps.Equal(got, c.want) {
				t.Errorf("got  %v\nwant %v", got, c.want)
			}
		})
	}
}

// TestStreamsHaveThreeReplicasOnThreeServers checks the chart's values and the example values for
// the chart of NATS: three replicas on three servers, and an acknowledgment only after the disk.
func TestStreamsHaveThreeReplicasOnThreeServers(t *testing.T) {
	configuration := func(o *objects) map[string]string {
		i := slices.IndexFunc(o.configMaps, func(c *core.ConfigMap) bool { return c.Data["NATS_URL"] != "" })
		return o.configMaps[i].Data
	}
	if got := configuration(render(t, nil)); got["NATS_REPLICAS"] != "3" || len(got) != 2 {
		t.Errorf("the chart's own values: %v", got)
	}
	if got := configuration(render(t, values(t, everything))); got["NATS_PLACEMENT_TAGS"] != "disk:ssd,zone:a" {
		t.Errorf("everything: %v", got)
	}
	file, err := os.ReadFile("../examples/nats-values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var nats struct {
		Config struct {
			Merge   map[string]string
			Cluster struct {
				Enabled  bool
				Replicas int
			}
			JetStream struct {
				Enabled   bool
				FileStore struct {
					Enabled bool
					PVC     struct{ Enabled bool }
				}
				Merge struct {
					SyncInterval string `json:"sync_interval"`
				}
			}
		}
		PodTemplate struct {
			TopologySpreadConstraints map[string]struct{ WhenUnsatisfiable string }
		}
	}
	if err := yaml.Unmarshal(file, &nats); err != nil {
		t.Fatal(err)
	}
	c := nats.Config
	if !c.Cluster.Enabled || c.Cluster.Replicas != 3 || !c.JetStream.Enabled || !c.JetStream.FileStore.Enabled ||
		!c.JetStream.FileStore.PVC.Enabled || c.JetStream.Merge.SyncInterval != "always" ||
		nats.PodTemplate.TopologySpreadConstraints["kubernetes.io/hostname"].WhenUnsatisfiable != "DoNotSchedule" {
		t.Errorf("the values for NATS: %+v", nats)
	}
	page, err := os.ReadFile("../../../docs/kubernetes.md")
	accounts := c.Merge["00$include"]
	flag := `--set-file 'configMap.merge.data.` + strings.ReplaceAll(accounts, ".", `\.`) + "=keys/" + accounts + "'"
	if err != nil || accounts == "" || !strings.Contains(string(page), flag) {
		t.Errorf("kubernetes.md does not give the servers the file that the values include, %s: %v", flag, err)
	}
}

// duration parses a default of the documentation.
func duration(t *testing.T, s string) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(s)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// variable returns the value of an environment variable, or an empty string if the Deployment does
// not set it.
func variable(d *apps.Deployment, name string) string { return variableOf(d.Spec.Template.Spec, name) }

func variableOf(pod core.PodSpec, name string) string {
	env := pod.Containers[0].Env
	if i := slices.IndexFunc(env, func(e core.EnvVar) bool { return e.Name == name }); i >= 0 {
		return env[i].Value
	}
	return ""
}

func TestPodsAreGivenTheTimeThatTheyNeedToStop(t *testing.T) {
	known := documented(t)
	eachRendering(t, func(t *testing.T, o *objects) {
		need := map[string]time.Duration{
			"api":   duration(t, variable(o.deployments["api"], "API_STOP_DELAY")) + duration(t, known["API_REQUEST_TIMEOUT"]),
			"relay": duration(t, known["RELAY_DRAIN_TIMEOUT"]) + duration(t, known["RELAY_DATABASE_TIMEOUT"]),
		}
		for _, consumer := range []string{"followercounts", "threadcache", "archiver"} {
			need[consumer] = duration(t, known["CONSUMER_APPLY_TIMEOUT"])
		}
		for name, d := range o.deployments {
			grace := time.Duration(*d.Spec.Template.Spec.TerminationGracePeriodSeconds) * time.Second
			if grace <= need[name] || need[name] == 0 {
				t.Errorf("Kubernetes kills %s after %v, but it may need %v to stop", name, grace, need[name])
			}
		}
	})
}

func TestProbesAndServicesUsePortsThatAreThere(t *testing.T) {
	eachRendering(t, func(t *testing.T, o *objects) {
		for name, d := range o.deployments {
			c := d.Spec.Template.Spec.Containers[0]
			ports := map[string]int32{}
			for _, p := range c.Ports {
				ports[p.Name] = p.ContainerPort
			}
			if c.LivenessProbe.HTTPGet.Path != "/healthz" || c.ReadinessProbe.HTTPGet.Path != "/readyz" {
				t.Errorf("%s: probes %+v %+v", name, c.LivenessProbe, c.ReadinessProbe)
			}
			for _, p := range []*core.Probe{c.LivenessProbe, c.ReadinessProbe} {
				if ports[p.HTTPGet.Port.StrVal] == 0 {
					t.Errorf("%s: a probe uses the port %s, which the container lacks", name, p.HTTPGet.Port.StrVal)
				}
			}
			if variable(d, "OPS_ADDR") != fmt.Sprintf(":%d", ports["ops"]) {
				t.Errorf("%s: OPS_ADDR is not the port %d", name, ports["ops"])
			}
			for _, s := range o.services {
				if !labels.SelectorFromSet(s.Spec.Selector).Matches(labels.Set(d.Spec.Template.Labels)) {
					continue
				}
				for _, p := range s.Spec.Ports {
					if ports[p.TargetPort.StrVal] == 0 {
						t.Errorf("the service %s leads to the port %s, which %s lacks", s.Name, p.TargetPort.StrVal, name)
					}
				}
			}
		}
	})
}

func TestMountsAndVolumesBelongTogether(t *testing.T) {
	o := render(t, values(t, everything))
	for name, d := range o.deployments {
		spec := d.Spec.Template.Spec
		mounts, volumes := map[string]bool{}, map[string]bool{}
		for _, m := range spec.Containers[0].VolumeMounts {
			mounts[m.Name] = true
		}
		for _, v := range spec.Volumes {
			volumes[v.Name] = true
		}
		want := map[string]bool{"nats-credentials": true, "nats-ca": true}
		if name == "api" {
			want["tls"] = true
		}
		if !maps.Equal(mounts, want) || !maps.Equal(volumes, want) {
			t.Errorf("%s mounts %v of the volumes %v, want %v", name, mounts, volumes, want)
		}
	}
}

func TestMigrationsRunFirstAndNeedNothingOfTheChart(t *testing.T) {
	eachRendering(t, func(t *testing.T, o *objects) {
		job := o.jobs[0]
		if job.Annotations["helm.sh/hook"] != "pre-install,pre-upgrade" {
			t.Errorf("annotations %v", job.Annotations)
		}
		spec := job.Spec.Template.Spec
		if spec.ServiceAccountName != "" || spec.Containers[0].EnvFrom != nil || spec.Volumes != nil {
			t.Errorf("the job refers to objects that Helm creates after it: %+v", spec)
		}
		if got := spec.Containers[0].Command; !slices.Equal(got, []string{"/bin/tidings", "migrate"}) {
			t.Errorf("it runs %v", got)
		}
		for _, n := range o.networks {
			if selects(t, &n.Spec.PodSelector, job.Spec.Template.Labels) &&
				n.Annotations["helm.sh/hook-weight"] >= job.Annotations["helm.sh/hook-weight"] &&
				job.Annotations["helm.sh/hook-weight"] != "" {
				t.Error("Helm creates the job's network policy after the job")
			}
		}
	})
}

// TestNetworkPoliciesNameWhoMayComeIn: each port of each pod has a list of callers, and without one
// nobody may connect.
func TestNetworkPoliciesNameWhoMayComeIn(t *testing.T) {
	here := []networking.NetworkPolicyPeer{{PodSelector: &meta.LabelSelector{}}}
	edge := []networking.NetworkPolicyPeer{{NamespaceSelector: &meta.LabelSelector{MatchLabels: map[string]string{"name": "edge"}}}}
	for name, c := range map[string]struct {
		values    string
		http, ops []networking.NetworkPolicyPeer
	}{
		"the chart's own values": {"", here, here},
		"everything":             {everything, edge, here},
		"nobody":                 {"networkPolicy: {apiFrom: [], opsFrom: []}", nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			o := render(t, values(t, c.values))
			for part, pod := range o.podsOf() {
				want := map[string][]networking.NetworkPolicyPeer{}
				if part == "api" && c.http != nil {
					want["http"] = c.http
				}
				if part != "migrate" && c.ops != nil {
					want["ops"] = c.ops
				}
				got := map[string][]networking.NetworkPolicyPeer{}
				for _, n := range o.networks {
					if !selects(t, &n.Spec.PodSelector, pod.Labels) {
						continue
					}
					if !slices.Contains(n.Spec.PolicyTypes, networking.PolicyTypeIngress) {
						t.Errorf("%s: the policy admits everybody", part)
					}
					for _, rule := range n.Spec.Ingress {
						for _, port := range rule.Ports {
							got[port.Port.StrVal] = append(got[port.Port.StrVal], rule.From...)
						}
					}
				}
				a, _ := json.Marshal(want)
				b, _ := json.Marshal(got)
				if !bytes.Equal(a, b) {
					t.Errorf("%s admits %s, want %s", part, b, a)
				}
			}
		})
	}
}

func TestScalersFollowOurLagAndStopAtThePartitions(t *testing.T) {
	o := render(t, values(t, everything))
	if len(o.scalers) != len(binaries) {
		t.Fatalf("%d scalers", len(o.scalers))
	}
	for _, s := range o.scalers {
		name := s.Labels["app.kubernetes.io/component"]
		d := o.deployments[name]
		if s.Spec.ScaleTargetRef.Name != d.Name || d.Spec.Replicas != nil {
			t.Errorf("%s scales %s, which has %v replicas of its own", s.Name, s.Spec.ScaleTargetRef.Name, d.Spec.Replicas)
		}
		if name == "api" {
			continue
		}
		want, metric := int32(4), "tidings_consumer_lag_seconds" // the partitions
		if name == "followercounts" {
			want = 3 // its own limit is lower
		}
		if name == "relay" {
			metric = "tidings_outbox_oldest_undelivered_seconds"
		}
		got := s.Spec.Metrics[0].External.Metric
		labels := map[string]string{"namespace": "social", "service": s.Name}
		if name != "relay" {
			labels["consumer"] = name
		}
		if s.Spec.MaxReplicas != want || got.Name != metric || !maps.Equal(got.Selector.MatchLabels, labels) {
			t.Errorf("%s scales up to %d by %+v, want up to %d by %s", name, s.Spec.MaxReplicas, got, want, metric)
		}
	}
	for _, d := range render(t, nil).deployments {
		if d.Spec.Replicas == nil || *d.Spec.Replicas != 2 {
			t.Errorf("%s without a scaler has %v replicas", d.Name, d.Spec.Replicas)
		}
	}
}

func TestRulesAndDashboardsAreTheFilesOfThisRepository(t *testing.T) {
	o := render(t, values(t, everything))
	file, err := os.ReadFile("../../prometheus/rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	var want monitoring.PrometheusRuleSpec
	if err := yaml.UnmarshalStrict(file, &want); err != nil {
		t.Fatal(err)
	}
	a, _ := json.Marshal(want)
	b, _ := json.Marshal(o.rules[0].Spec)
	if len(want.Groups) == 0 || !bytes.Equal(a, b) {
		t.Errorf("the PrometheusRule differs from rules.yml:\n%s\n%s", a, b)
	}
	paths, err := filepath.Glob("../../grafana/*.json")
	if err != nil || len(paths) == 0 {
		t.Fatal(paths, err)
	}
	for _, path := range paths {
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if n := count(o.configMaps, func(c *core.ConfigMap) bool {
			return c.Data[filepath.Base(path)] == string(want) && c.Labels["grafana_dashboard"] == "1"
		}); n != 1 {
			t.Errorf("%d ConfigMaps have the dashboard %s", n, filepath.Base(path))
		}
	}
	monitor := o.monitors[0]
	for _, s := range o.services {
		if !selects(t, &monitor.Spec.Selector, s.Labels) ||
			!slices.ContainsFunc(s.Spec.Ports, func(p core.ServicePort) bool { return p.Name == monitor.Spec.Endpoints[0].Port }) {
			t.Errorf("the ServiceMonitor does not scrape the service %s", s.Name)
		}
	}
}

func TestNamesAreShortEnoughAndUnique(t *testing.T) {
	eachRendering(t, func(t *testing.T, o *objects) {
		for _, m := range o.metas {
			if m.Name == "" || len(m.Name) > 63 || m.Labels["app.kubernetes.io/instance"] != release {
				t.Errorf("%q has labels %v", m.Name, m.Labels)
			}
		}
		if !strings.Contains(o.notes, "deploy/"+release+"-tidings-archiver") {
			t.Errorf("the notes do not name the archiver's Deployment: %s", o.notes)
		}
	})
}

func TestImagesAreNamedByDigestOrTag(t *testing.T) {
	for v, want := range map[string]string{
		"": "tidings:" + chartVersion, "image: {tag: v2}": "tidings:v2",
		everything: "registry.example/tidings@sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
	} {
		for name, pod := range render(t, values(t, v)).podsOf() {
			if got := pod.Spec.Containers[0].Image; got != want {
				t.Errorf("%s: %s, want %s", name, got, want)
			}
		}
	}
}

// TestPodsChangeWithTheConfiguration checks that a change of the ConfigMap restarts the pods.
func TestPodsChangeWithTheConfiguration(t *testing.T) {
	a, b := render(t, nil), render(t, values(t, "env: {LOG_LEVEL: debug}"))
	for _, name := range binaries {
		before, after := a.deployments[name].Spec.Template.Annotations, b.deployments[name].Spec.Template.Annotations
		if before["checksum/configuration"] == after["checksum/configuration"] {
			t.Errorf("%s continues with the old configuration", name)
		}
	}
}

func TestValuesThatCannotWorkAreRefused(t *testing.T) {
	for _, v := range []string{
		"partitions: 0", "partitions: 33", "replica: 3", "api: {replica: 3}", "nats: {replicas: 6}", "nats: {placementTags: ['a,b']}",
		"nats: {url: 'nats://user:secret@nats:4222'}", "nats: {url: nats}",
		"env: {DATABASE_URL: 'postgres://x'}", "env: {API_CURSOR_KEY: abc}", "relay: {env: {DEV_TOKEN: abc}}",
		"env: {log_level: debug}", "env: {LOG_LEVEL: 3}",
		"postgres: {secret: ''}", "postgres: {password: x}", "image: {digest: sha256:12}", "image: {pullPolicy: Sometimes}",
		"networkPolicy: {apiFrom: [{}]}", "networkPolicy: {opsFrom: [{podSelectors: {}}]}",
		"api: {terminationGracePeriodSeconds: 5}",
		"api: {resources: {limits: null}}", "relay: {resources: {limits: {memory: null}}}", "relay: {autoscaling: {targetSeconds: 0}}",
		"podDisruptionBudget: {maxUnavailable: 0}", "nameOverride: A_B", "fullnameOverride: 1st", "serviceAccount: {create: 1}",
		"ingress: {enabled: true}", "ingress: {enabled: true, host: 'https://api.example.com'}",
		"api: {service: {type: ExternalName}}", "api: {stopDelay: soon}", "monitoring: {serviceMonitor: {interval: 15}}",
	} {
		if _, err := try(values(t, v)); err == nil || !strings.Contains(err.Error(), "schema") {
			t.Errorf("%s: %v", v, err)
		}
	}
}

// TestTheExamplesRender checks that the chart accepts the example values, in the mode that they
// choose.
func TestTheExamplesRender(t *testing.T) {
	paths, err := filepath.Glob("../examples/tidings-*.yaml")
	if err != nil || len(paths) == 0 {
		t.Fatal(paths, err)
	}
	for _, path := range paths {
		file, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		set := values(t, string(file))
		want := len(binaries)
		if set["mode"] == nil {
			set["mode"], want = "serve", 1
		}
		o := render(t, set)
		if len(o.deployments) != want {
			t.Errorf("%s: %d deployments", path, len(o.deployments))
		}
		for name := range set {
			if name != "api" && slices.Contains(append(binaries, "serve"), name) && o.deployments[name] == nil {
				t.Errorf("%s sets values of %s, which does not run", path, name)
			}
		}
	}
}

// TestTheKubernetesPageMakesWhatTheExampleNeeds compares the lines to paste with the example: each
// binary's credentials are signed and put into the Secret that the example names. The runbook's pod
// for commands is valid, and mounts the Secret that the page makes for it.
func TestTheKubernetesPageMakesWhatTheExampleNeeds(t *testing.T) {
	read := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	page := read("../../../docs/kubernetes.md")
	var signed []string
	for _, m := range regexp.MustCompile(`(?m)^for \w+ in ([^;]+); do tidings nats creds `).FindAllStringSubmatch(page, -1) {
		signed = append(signed, strings.Fields(m[1])...)
	}
	secrets := map[string]string{} // what `kubectl create secret` gives each
	for _, m := range regexp.MustCompile(`(?m)^kubectl create secret generic (\S+) (.+)$`).FindAllStringSubmatch(page, -1) {
		secrets[m[1]] = m[2]
	}
	for name, d := range render(t, values(t, read("../examples/tidings-three-brokers.yaml"))).deployments {
		if !slices.Contains(signed, name) {
			t.Errorf("the page signs no credentials for %s", name)
		}
		for _, v := range d.Spec.Template.Spec.Volumes {
			for _, item := range v.Secret.Items {
				if !strings.Contains(secrets[v.Secret.SecretName]+" ", "--from-file="+item.Key+" ") {
					t.Errorf("the page puts no %s into %s", item.Key, v.Secret.SecretName)
				}
			}
		}
		for _, e := range d.Spec.Template.Spec.Containers[0].Env {
			if from := e.ValueFrom; from != nil && secrets[from.SecretKeyRef.Name] == "" {
				t.Errorf("%s reads the Secret %s, which the page does not create", name, from.SecretKeyRef.Name)
			}
		}
	}
	var pod core.Pod
	m := regexp.MustCompile("(?s)```yaml\n(apiVersion: v1\nkind: Pod\n.*?)```").FindStringSubmatch(read("../../../docs/runbook/README.md"))
	if m == nil {
		t.Fatal("the runbook has no pod for commands")
	}
	if err := yaml.UnmarshalStrict([]byte(m[1]), &pod); err != nil {
		t.Fatal(err)
	}
	file := filepath.Base(variableOf(pod.Spec, "NATS_CREDENTIALS"))
	if name := pod.Spec.Volumes[0].Secret.SecretName; file == "." || secrets[name] != "--from-file="+file {
		t.Errorf("the pod for commands reads %s of %s, which has %q", file, name, secrets[name])
	}
}

// TestServeIsTheDefault renders the chart without a mode: one Deployment of two pods that run every
// part, with one login.
func TestServeIsTheDefault(t *testing.T) {
	for name, v := range map[string]string{"the chart's own values": "{}", "everything": everything} {
		t.Run(name, func(t *testing.T) {
			set := values(t, v)
			chart, err := loader.Load(chartPath)
			if err != nil {
				t.Fatal(err)
			}
			if chart.Values["mode"] != "serve" {
				t.Errorf("the mode is %v", chart.Values["mode"])
			}
			set["mode"] = "serve"
			o := render(t, set)
			d := o.deployments["serve"]
			if len(o.deployments) != 1 || d == nil || *d.Spec.Replicas != 2 {
				t.Fatalf("deployments: %v", slices.Collect(maps.Keys(o.deployments)))
			}
			c := d.Spec.Template.Spec.Containers[0]
			if !slices.Equal(c.Command, []string{"/bin/tidings", "serve"}) || variable(d, "OPS_ADDR") != ":9180" ||
				variable(d, "API_ADDR") != ":8080" {
				t.Errorf("the container: %+v", c)
			}
			// The pods' API needs neither NATS nor the other parts.
			if path := c.ReadinessProbe.HTTPGet.Path; path != "/readyz?part=api" {
				t.Errorf("the readiness probe asks for %s", path)
			}
			for _, e := range c.Env {
				if e.Name == "DATABASE_URL" && e.ValueFrom.SecretKeyRef.Key != "serve" {
					t.Errorf("the login is %s", e.ValueFrom.SecretKeyRef.Key)
				}
			}
			matching(t, o, "serve", labels.Set(d.Spec.Template.Labels))
			known := documented(t)
			need := duration(t, variable(d, "API_STOP_DELAY")) + duration(t, known["API_REQUEST_TIMEOUT"]) +
				duration(t, known["CONSUMER_APPLY_TIMEOUT"]) + duration(t, known["RELAY_DRAIN_TIMEOUT"]) +
				duration(t, known["RELAY_DATABASE_TIMEOUT"])
			if grace := time.Duration(*d.Spec.Template.Spec.TerminationGracePeriodSeconds) * time.Second; grace <= need {
				t.Errorf("Kubernetes kills serve after %v, but it may need %v to stop", grace, need)
			}
			for _, m := range o.monitors {
				if relabel := m.Spec.Endpoints[0].MetricRelabelConfigs; len(relabel) != 1 || relabel[0].TargetLabel != "job" {
					t.Errorf("the metrics of parts get no job: %+v", relabel)
				}
			}
			if !strings.Contains(o.notes, release+"-tidings-serve:8080") {
				t.Errorf("the notes:\n%s", o.notes)
			}
		})
	}
}

func TestHelmsLinterFindsNothing(t *testing.T) {
	dir := chartPath
	if strings.HasSuffix(dir, ".tgz") { // the linter reads only folders
		dir = filepath.Join(t.TempDir(), "tidings")
		if out, err := exec.Command("tar", "-xf", chartPath, "-C", filepath.Dir(dir)).CombinedOutput(); err != nil {
			t.Fatalf("tar: %v: %s", err, out)
		}
	}
	for _, m := range lint.RunAll(dir, nil, "social").Messages {
		t.Errorf("%s", m)
	}
	chart, err := loader.Load(chartPath)
	if err != nil {
		t.Fatal(err)
	}
	m := chart.Metadata
	if m.Version != chartVersion || m.AppVersion != chartVersion || m.Home == "" || m.Icon == "" || len(m.Sources) == 0 ||
		len(m.Maintainers) == 0 || m.Maintainers[0].Name == "" {
		t.Errorf("Chart.yaml: %+v", m)
	}
	// A packaged chart has the icon's address only, so the icon must be where the address says.
	_, path, _ := strings.Cut(m.Icon, "/main/")
	if _, err := os.Stat("../../../" + path); err != nil {
		t.Errorf("icon: %v", err)
	}
	if !slices.ContainsFunc(chart.Files, func(f *common.File) bool { return f.Name == "README.md" }) {
		t.Error("the chart has no README.md")
	}
}

// TestTheTestAsksEveryPart checks the pod of `helm test`: it asks the ops port of each Service that
// has one.
func TestTheTestAsksEveryPart(t *testing.T) {
	for mode, n := range map[string]int{"serve": 1, "fleet": len(binaries)} {
		o := render(t, values(t, "mode: "+mode))
		pod := o.tests[0]
		if pod.Annotations["helm.sh/hook"] != "test" || len(pod.Spec.Containers) != n || !*pod.Spec.SecurityContext.RunAsNonRoot {
			t.Errorf("%+v asks %d parts, want %d", pod.Annotations, len(pod.Spec.Containers), n)
		}
		for _, c := range pod.Spec.Containers {
			if count(o.services, func(s *core.Service) bool {
				ops := slices.IndexFunc(s.Spec.Ports, func(p core.ServicePort) bool { return p.Name == "ops" })
				return c.Command[3] == fmt.Sprintf("http://%s:%d/readyz", s.Name, s.Spec.Ports[ops].Port)
			}) != 1 {
				t.Errorf("%s asks %s, which is no Service's ops port", c.Name, c.Command[3])
			}
		}
	}
	if got := len(render(t, values(t, "api: {service: {type: LoadBalancer}}")).tests[0].Spec.Containers); got != len(binaries)-1 {
		t.Errorf("%d parts are asked, and the API has no ops port", got)
	}
}

func TestTheIngressLeadsToTheAPI(t *testing.T) {
	for mode, name := range map[string]string{"serve": "serve", "fleet": "api"} {
		if o := render(t, values(t, "mode: "+mode)); o.ingresses != nil {
			t.Errorf("an ingress without being asked for: %+v", o.ingresses)
		}
		o := render(t, values(t, everything+"mode: "+mode))
		spec := o.ingresses[0].Spec
		to := spec.Rules[0].HTTP.Paths[0].Backend.Service
		if *spec.IngressClassName != "nginx" || spec.Rules[0].Host != "api.example.com" || spec.TLS[0].SecretName != "edge-tls" ||
			spec.TLS[0].Hosts[0] != "api.example.com" || to.Name != release+"-tidings-"+name || to.Port.Name != "http" {
			t.Errorf("the ingress: %+v", spec)
		}
		if count(o.services, func(s *core.Service) bool { return s.Name == to.Name && s.Spec.Ports[0].Name == "http" }) != 1 {
			t.Errorf("no service %s", to.Name)
		}
	}
}

// TestNamesCanBeChosen checks that every object and reference follows the names of the values.
func TestNamesCanBeChosen(t *testing.T) {
	o := render(t, values(t, everything+"nameOverride: feed\nfullnameOverride: app"))
	for _, m := range o.metas {
		if m.Name != "app" && !strings.HasPrefix(m.Name, "app-") || m.Labels["app.kubernetes.io/name"] != "feed" {
			t.Errorf("%s has the labels %v", m.Name, m.Labels)
		}
	}
	if strings.Contains(o.source, release+"-tidings") || strings.Contains(o.source, "name: tidings\n") {
		t.Error("an object refers to the default name")
	}
	for _, name := range binaries {
		matching(t, o, name, labels.Set(o.deployments[name].Spec.Template.Labels))
	}
	if got := render(t, values(t, "nameOverride: feed")).deployments["relay"].Name; got != release+"-feed-relay" {
		t.Errorf("the Deployment is %s", got)
	}
	for v, want := range map[string]string{
		"": release + "-tidings", "serviceAccount: {name: mine}": "mine", "serviceAccount: {create: false}": "default",
		"serviceAccount: {create: false, name: theirs}": "theirs",
	} {
		o := render(t, values(t, v))
		if got := o.deployments["api"].Spec.Template.Spec.ServiceAccountName; got != want {
			t.Errorf("%q: the account %s, want %s", v, got, want)
		}
		if made := len(o.accounts) == 1 && o.accounts[0].Name == want; made == strings.Contains(v, "create: false") {
			t.Errorf("%q makes the accounts %+v", v, o.accounts)
		}
	}
}

// TestEveryPodFollowsThePlacement checks that also the Job and the test run where the values say.
func TestEveryPodFollowsThePlacement(t *testing.T) {
	o := render(t, values(t, everything))
	specs := map[string]core.PodSpec{"test": o.tests[0].Spec}
	for name, pod := range o.podsOf() {
		specs[name] = pod.Spec
	}
	for name, s := range specs {
		if s.NodeSelector["disk"] != "ssd" || len(s.Tolerations) != 1 || s.PriorityClassName != "high" || len(s.ImagePullSecrets) != 1 ||
			s.Affinity == nil || s.Affinity.NodeAffinity == nil {
			t.Errorf("%s: %+v", name, s)
		}
	}
}
