//go:build docker

package deploy_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/tidings/tidings/internal/pglocal"
	"github.com/tidings/tidings/internal/testkit"
)

// composed is a fleet that `make up` started. It has its own project name, ports and volumes.
type composed struct {
	t       *testing.T
	env     []string
	args    []string // of docker: `compose` and its files; the command follows
	console string
}

func compose(t *testing.T, brokers, mode string) *composed {
	t.Helper()
	c := &composed{t: t, env: os.Environ()}
	secrets, project := filepath.Join(t.TempDir(), "env"), fmt.Sprintf("tidings-test-%d-%s-%s", os.Getpid(), mode, brokers)
	for name, value := range map[string]string{"TIDINGS_IMAGE": testImage, "ENV_FILE": secrets, "BROKERS": brokers, "MODE": mode,
		"METRICS": "", "NATS_REPLICAS": brokers, "COMPOSE_PROJECT_NAME": project} {
		c.env = append(c.env, name+"="+value)
	}
	for _, name := range []string{"API_PORT", "CONSOLE_PORT", "POSTGRES_PORT", "NATS_PORT"} {
		port, err := pglocal.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		c.env = append(c.env, fmt.Sprintf("%s=%d", name, port))
		if name == "CONSOLE_PORT" {
			c.console = fmt.Sprintf("http://127.0.0.1:%d/console/", port)
		}
	}
	c.args = []string{"compose", "--env-file", secrets, "-f", "compose.yaml"}
	if brokers == "3" {
		c.args = append(c.args, "-f", "compose.three.yaml")
	}
	if mode == "fleet" {
		c.args = append(c.args, "-f", "compose.fleet.yaml")
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(c.docker("logs", "--tail", "40"))
		}
		c.docker("down", "--volumes", "--timeout", "10")
	})
	return c
}

func (c *composed) command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Env = c.env
	return cmd
}

// docker runs `docker compose` with args and returns its output.
func (c *composed) docker(args ...string) string {
	c.t.Helper()
	return output(c.t, c.command("docker", append(c.args[:len(c.args):len(c.args)], args...)...))
}

// make runs the script of `make up` or `make down`.
func (c *composed) make(target string) {
	c.t.Helper()
	output(c.t, c.command("sh", "docker.sh", target))
}

func (c *composed) tidings(args ...string) string {
	c.t.Helper()
	return strings.TrimSpace(c.docker(append([]string{"run", "--rm", "-T", "tidings"}, args...)...))
}

// healthy waits until every running container is healthy, and there are want of them.
func (c *composed) healthy(want int) {
	c.t.Helper()
	testkit.Eventually(c.t, "health", func() (bool, error) {
		healthy, other := 0, []string{}
		for line := range strings.Lines(c.docker("ps", "--format", "json")) {
			var ctr struct{ Name, Health string }
			if err := json.Unmarshal([]byte(line), &ctr); err != nil {
				return false, err
			}
			if ctr.Health == "healthy" {
				healthy++
			} else {
				other = append(other, ctr.Name+" "+ctr.Health)
			}
		}
		if healthy != want || len(other) > 0 {
			return false, fmt.Errorf("%d containers are healthy, want %d; the others: %v", healthy, want, other)
		}
		return true, nil
	})
}

// signIn opens the console with a system token.
func (c *composed) signIn() {
	c.t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		c.t.Fatal(err)
	}
	client := &http.Client{Jar: jar, Transport: &http.Transport{DisableKeepAlives: true}}
	token := c.tidings("token", "create", "--system", "--name", "me", "--roles", "read,moderate,admin")
	resp, err := client.PostForm(c.console+"sign-in", url.Values{"token": {token}, "next": {"/console/"}})
	if err != nil {
		c.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || resp.Request.URL.Path != "/console/" {
		c.t.Errorf("the console answers %d at %s", resp.StatusCode, resp.Request.URL)
	}
}

// clean fails the test if a projection lacks a write, or if `tidings doctor` finds a problem.
func (c *composed) clean() {
	c.t.Helper()
	c.tidings("verify", "--wait", "90s")
	if out := c.tidings("doctor", "--json"); out != "" {
		c.t.Errorf("tidings doctor finds %s", out)
	}
}

// TestServeInContainers kills the only process of the parts while a client writes, and lets Compose
// start it again. In the end every write is there.
func TestServeInContainers(t *testing.T) {
	buildImage(t, testImage)
	c := compose(t, "1", "serve")
	c.make("up")
	const services = 4 // serve, console, postgres, nats
	c.healthy(services)
	c.signIn()
	token := c.tidings("token", "create", "--tenant", "1", "--name", "me")
	load := c.command("docker", append(c.args[:len(c.args):len(c.args)], "run", "--rm", "-T", "tidings", "load", "--url",
		"http://serve:8080", "--token", token, "--json", "--generate", "users=1000,edges=10000,seed=1")...)
	var result, problems strings.Builder
	load.Stdout, load.Stderr = &result, &problems
	if err := load.Start(); err != nil {
		t.Fatal(err)
	}
	c.docker("kill", "--signal", "KILL", "serve")
	c.docker("start", "serve")
	if err := load.Wait(); err != nil {
		t.Fatalf("load: %v\n%s%s", err, &result, &problems)
	}
	c.healthy(services)
	c.clean()
}

// TestTheFleetInContainers kills a relay and one of three brokers, restarts PostgreSQL, and adds
// instances while a client writes. Then it stops and starts the whole fleet. In the end the fleet
// has every write.
func TestTheFleetInContainers(t *testing.T) {
	buildImage(t, testImage)
	for _, brokers := range []string{"1", "3"} {
		t.Run(brokers+" brokers", func(t *testing.T) {
			c := compose(t, brokers, "fleet")
			c.make("up")
			services := 9 // api, console, two relays, followercounts, threadcache, archiver, postgres, nats
			if brokers == "3" {
				services += 2
			}
			c.healthy(services)
			c.signIn()
			token := c.tidings("token", "create", "--tenant", "1", "--name", "me")
			const edges = 160_000 // ten seconds on a fast machine, so that the faults come during the load
			graph := fmt.Sprintf("users=8000,edges=%d,seed=1", edges)
			load := c.command("docker", append(c.args[:len(c.args):len(c.args)], "run", "--rm", "-T", "tidings", "load", "--url",
				"http://api:8080", "--token", token, "--json", "--generate", graph)...)
			var result, problems strings.Builder
			load.Stdout, load.Stderr = &result, &problems
			if err := load.Start(); err != nil {
				t.Fatal(err)
			}
			c.docker("kill", "--signal", "KILL", "relay")
			c.docker("start", "relay")
			if brokers == "3" {
				c.docker("kill", "--signal", "KILL", "nats-2")
				c.docker("start", "nats-2")
			}
			c.docker("restart", "postgres")
			c.docker("up", "--detach", "--scale", "relay=3", "--scale", "followercounts=2")
			if err := load.Wait(); err != nil {
				t.Fatalf("load: %v\n%s%s", err, &result, &problems)
			}
			var during, stays struct{ Edges, Created, Existed, Retried int64 }
			if err := json.Unmarshal([]byte(result.String()), &during); err != nil || during.Edges != edges || during.Retried == 0 {
				t.Errorf("the load wrote less than everything, or no fault made it retry: %s, %v", &result, err)
			}
			c.healthy(services + 2)
			c.clean()
			c.make("down")
			c.make("up")
			c.healthy(services)
			c.clean()
			again := c.tidings("load", "--url", "http://api:8080", "--token", token, "--json", "--generate", graph)
			if err := json.Unmarshal([]byte(again), &stays); err != nil || stays.Created != 0 || stays.Existed != edges {
				t.Errorf("after a stop, the same load reports %s, want every edge to exist: %v", again, err)
			}
		})
	}
}
