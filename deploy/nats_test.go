package deploy_test

import (
	"fmt"
	"maps"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats-server/v2/server"
	"go.yaml.in/yaml/v3"
)

func TestBrokerOfTheFleetSyncsBeforeItAcknowledgesAndKnowsEachBinary(t *testing.T) {
	for _, name := range []string{"RELAY", "API", "CONSUMER", "OPERATOR", "SERVE", "CLUSTER"} {
		t.Setenv("NATS_PASSWORD_"+name, "p0123456789abcdef"+name)
	}
	t.Setenv("NATS_SERVER_NAME", "nats-2")
	for n := range 3 {
		t.Setenv(fmt.Sprintf("NATS_ROUTE_%d", n+1), fmt.Sprintf("nats://cluster:p0123456789abcdefCLUSTER@nats-%d:6222", n+1))
	}
	three, err := server.ProcessConfigFile("nats-three.conf")
	if err != nil || !three.SyncAlways || len(three.Users) != 5 || three.ServerName != "nats-2" || three.Cluster.Name == "" ||
		three.Cluster.Password == "" {
		t.Errorf("the configuration of one of three brokers: %v, %+v", err, three)
	}
	if len(three.Routes) != 3 {
		t.Errorf("the broker knows %d members of its cluster, want 3", len(three.Routes))
	}
	for n, route := range three.Routes {
		if password, _ := route.User.Password(); password != three.Cluster.Password || route.User.Username() != three.Cluster.Username ||
			route.Host != fmt.Sprintf("nats-%d:6222", n+1) {
			t.Errorf("the broker connects to %s as %s", route.Host, route.User)
		}
	}
	opts, err := server.ProcessConfigFile("nats.conf")
	if err != nil {
		t.Fatal(err)
	}
	if !opts.JetStream || !opts.SyncAlways || opts.JetStreamMaxStore <= 0 || opts.StoreDir != "/data" {
		t.Errorf("JetStream %v, sync always %v, limit %d bytes in %q", opts.JetStream, opts.SyncAlways, opts.JetStreamMaxStore,
			opts.StoreDir)
	}
	if opts.HTTPHost != "127.0.0.1" || opts.HTTPPort != 8222 {
		t.Errorf("the monitoring port listens on %s:%d, want loopback: only the container's health check reads it",
			opts.HTTPHost, opts.HTTPPort)
	}
	if len(opts.Users) != 5 || opts.NoAuthUser != "" {
		t.Errorf("%d users, want 5; clients without a password get the user %q, want none", len(opts.Users), opts.NoAuthUser)
	}
	for _, u := range opts.Users {
		if u.Password != "p0123456789abcdef"+strings.ToUpper(u.Username) || u.Permissions == nil || len(u.Permissions.Publish.Allow) == 0 ||
			len(u.Permissions.Subscribe.Allow) == 0 {
			t.Errorf("user %s: password %q, permissions %+v", u.Username, u.Password, u.Permissions)
		}
	}
}

func readCompose(t *testing.T, name string, into any) {
	t.Helper()
	text, err := os.ReadFile(name)
	if err == nil {
		err = yaml.Unmarshal(text, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestEachServiceOfTheFleetHasALoginOfItsOwn checks compose.yaml and compose.fleet.yaml: only the
// migration runs as the superuser, no two services share a login, and `migrate` and NATS know the
// login, user and password of each service.
func TestEachServiceOfTheFleetHasALoginOfItsOwn(t *testing.T) {
	var file, fleet struct {
		Services map[string]struct{ Environment map[string]string }
		Configs  map[string]struct{ Content string }
	}
	readCompose(t, "compose.yaml", &file)
	readCompose(t, "compose.fleet.yaml", &fleet)
	for name, s := range fleet.Services {
		if name != "serve" {
			file.Services[name] = s
		}
	}
	variable, used := regexp.MustCompile(`\$\{([A-Z_]+)(:\?[^}]*)?\}`), map[string]string{}
	user := func(service, text string) string {
		u, err := url.Parse(variable.ReplaceAllString(text, "$1"))
		if err != nil {
			t.Fatal(err)
		}
		password, _ := u.User.Password()
		if service != "migrate" && u.Scheme == "postgres" && !strings.Contains(file.Configs["logins"].Content, " ${"+password+"}\n") {
			t.Errorf("%s: migrate creates no login with the password %s", service, password)
		}
		if u.Scheme == "nats" && password != "NATS_PASSWORD_"+strings.ToUpper(u.User.Username()) {
			t.Errorf("%s: the NATS user %s has the password of another: %s", service, u.User.Username(), password)
		}
		return u.User.Username()
	}
	for name, s := range file.Services {
		url, ours := s.Environment["DATABASE_URL"]
		if !ours {
			continue
		}
		if projections, apart := s.Environment["PROJECTIONS_DATABASE_URL"]; apart {
			user(name, url)
			url = projections
		}
		login := user(name, url)
		if other, taken := used[login]; taken || (login == "postgres") != (name == "migrate") {
			t.Errorf("%s and %q share the login %s, or another service than migrate is the superuser", name, other, login)
		}
		used[login] = name
		if nats := user(name, s.Environment["NATS_URL"]); s.Environment["NATS_INBOX_PREFIX"] != "_INBOX_"+nats {
			t.Errorf("%s: the NATS user %s has the inbox prefix %s", name, nats, s.Environment["NATS_INBOX_PREFIX"])
		}
	}
	if len(used) != 9 {
		t.Errorf("%d services have a login, want 9: %v", len(used), used)
	}
}

// TestNoCommandLineHasASecret checks the files of Compose: every user of the machine sees the
// arguments of every process.
func TestNoCommandLineHasASecret(t *testing.T) {
	for _, name := range []string{"compose.yaml", "compose.three.yaml", "compose.fleet.yaml"} {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		var file struct {
			Services map[string]struct {
				Command, Entrypoint []string
				Healthcheck         struct{ Test []string }
			}
		}
		if err := yaml.Unmarshal(text, &file); err != nil {
			t.Fatal(err)
		}
		for service, s := range file.Services {
			for _, arg := range slices.Concat(s.Command, s.Entrypoint, s.Healthcheck.Test) {
				if strings.Contains(arg, "$") {
					t.Errorf("%s: %s gets %s as an argument", name, service, arg)
				}
			}
		}
	}
}

// TestEachServiceOfTheFleetIsConfined checks both files: no service has a capability or can gain
// one, and ours write only to their volumes. Each service that keeps running has a health check. A
// service that may have several instances takes no fixed port of the machine.
func TestEachServiceOfTheFleetIsConfined(t *testing.T) {
	var file, fleet struct {
		Services map[string]struct {
			Image       string
			ReadOnly    bool     `yaml:"read_only"`
			CapDrop     []string `yaml:"cap_drop"`
			SecurityOpt []string `yaml:"security_opt"`
			Ports       []string
			Healthcheck struct {
				Test    []string
				Disable bool
			}
		}
	}
	readCompose(t, "compose.yaml", &file)
	readCompose(t, "compose.fleet.yaml", &fleet)
	delete(fleet.Services, "serve") // it only turns serve off
	maps.Copy(file.Services, fleet.Services)
	for name, s := range file.Services {
		// Grafana writes outside its volume, and Compose writes the file of logins into the
		// container of migrate.
		if !slices.Equal(s.CapDrop, []string{"ALL"}) || !slices.Equal(s.SecurityOpt, []string{"no-new-privileges:true"}) ||
			!s.ReadOnly && name != "grafana" && name != "migrate" {
			t.Errorf("%s is not confined: %+v", name, s)
		}
		if ends := name == "migrate" || name == "nats-data" || name == "nats-probe" ||
			name == "tidings"; ends == (len(s.Healthcheck.Test) > 0 && !s.Healthcheck.Disable) {
			t.Errorf("%s has the health check %v", name, s.Healthcheck)
		}
		for _, port := range s.Ports {
			if strings.Contains(s.Image, "TIDINGS") && !strings.HasSuffix(port, ":8080") && !strings.HasSuffix(port, ":8081") &&
				!strings.HasPrefix(port, "127.0.0.1::") ||
				!strings.HasPrefix(port, "127.0.0.1:") {
				t.Errorf("%s takes the port %s, so it can run only once", name, port)
			}
		}
	}
}
