package deploy_test

import (
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
	for _, name := range []string{"RELAY", "API", "CONSUMER", "OPERATOR", "CLUSTER"} {
		t.Setenv("NATS_PASSWORD_"+name, "p0123456789abcdef"+name)
	}
	t.Setenv("NATS_SERVER_NAME", "nats-2")
	three, err := server.ProcessConfigFile("nats-three.conf")
	if err != nil || !three.SyncAlways || len(three.Users) != 4 || three.ServerName != "nats-2" || three.Cluster.Name == "" || three.Cluster.Password == "" {
		t.Errorf("one of three brokers: %v, %+v", err, three)
	}
	opts, err := server.ProcessConfigFile("nats.conf")
	if err != nil {
		t.Fatal(err)
	}
	if !opts.JetStream || !opts.SyncAlways || opts.JetStreamMaxStore <= 0 || opts.StoreDir != "/data" {
		t.Errorf("JetStream %v, sync always %v, at most %d bytes in %q", opts.JetStream, opts.SyncAlways, opts.JetStreamMaxStore, opts.StoreDir)
	}
	if len(opts.Users) != 4 || opts.NoAuthUser != "" {
		t.Errorf("%d users, without a password %q", len(opts.Users), opts.NoAuthUser)
	}
	for _, u := range opts.Users {
		if u.Password != "p0123456789abcdef"+strings.ToUpper(u.Username) || u.Permissions == nil || len(u.Permissions.Publish.Allow) == 0 || len(u.Permissions.Subscribe.Allow) == 0 {
			t.Errorf("user %s: password %q, permissions %+v", u.Username, u.Password, u.Permissions)
		}
	}
}

// TestEachServiceOfTheFleetHasALoginOfItsOwn: the superuser migrates and does nothing else, and each login and password of a service is one that migrate and NATS know.
func TestEachServiceOfTheFleetHasALoginOfItsOwn(t *testing.T) {
	text, err := os.ReadFile("compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Services map[string]struct{ Environment map[string]string }
		Configs  map[string]struct{ Content string }
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	variable, used := regexp.MustCompile(`\$\{([A-Z_]+)(:\?[^}]*)?\}`), map[string]string{}
	user := func(service, text string) string {
		u, err := url.Parse(variable.ReplaceAllString(text, "$1"))
		if err != nil {
			t.Fatal(err)
		}
		password, _ := u.User.Password()
		if service != "migrate" && u.Scheme == "postgres" && !strings.Contains(file.Configs["logins"].Content, " ${"+password+"}\n") {
			t.Errorf("%s: migrate makes no login with the password %s", service, password)
		}
		if u.Scheme == "nats" && password != "NATS_PASSWORD_"+strings.ToUpper(u.User.Username()) {
			t.Errorf("%s: user %s has the password %s", service, u.User.Username(), password)
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
			t.Errorf("%s and %q have the login %s", name, other, login)
		}
		used[login] = name
		if nats := user(name, s.Environment["NATS_URL"]); s.Environment["NATS_INBOX_PREFIX"] != "_INBOX_"+nats {
			t.Errorf("%s: user %s of NATS has the inbox %s", name, nats, s.Environment["NATS_INBOX_PREFIX"])
		}
	}
	if len(used) != 8 {
		t.Errorf("services with a login: %v", used)
	}
}

// TestEachServiceOfTheFleetIsConfined: no service has a capability or gains one, ours write nothing outside their volumes, those that keep running have a health check, and those
// of which several may run have no port of their own on the machine.
func TestEachServiceOfTheFleetIsConfined(t *testing.T) {
	text, err := os.ReadFile("compose.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
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
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	for name, s := range file.Services {
		// Grafana's image writes beside its volume, and Compose writes the logins into migrate.
		if !slices.Equal(s.CapDrop, []string{"ALL"}) || !slices.Equal(s.SecurityOpt, []string{"no-new-privileges:true"}) || !s.ReadOnly && name != "grafana" && name != "migrate" {
			t.Errorf("%s: %+v", name, s)
		}
		if ends := name == "migrate" || name == "nats-data" || name == "nats-probe" || name == "tidings"; ends == (len(s.Healthcheck.Test) > 0 && !s.Healthcheck.Disable) {
			t.Errorf("%s has the health check %v", name, s.Healthcheck)
		}
		for _, port := range s.Ports {
			if strings.Contains(s.Image, "TIDINGS") && !strings.HasSuffix(port, ":8080") && !strings.HasPrefix(port, "127.0.0.1::") || !strings.HasPrefix(port, "127.0.0.1:") {
				t.Errorf("%s takes %s: only one of it can run", name, port)
			}
		}
	}
}
