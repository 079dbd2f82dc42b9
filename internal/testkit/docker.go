package testkit

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/testcontainers/testcontainers-go"

	"github.com/tidings/tidings/internal/natsserver"
	"github.com/tidings/tidings/internal/pglocal"
)

func forceDocker() bool { return os.Getenv("TEST_SERVERS") == "docker" }

// dockerPostgres is a PostgreSQL in a container.
type dockerPostgres struct{ *containerServer }

const postgresPort = "5432/tcp"

// startDockerPostgres runs the image TEST_POSTGRES_IMAGE.
func startDockerPostgres(settings ...string) (server, error) {
	port, err := pglocal.FreePort()
	if err != nil {
		return nil, err
	}
	cmd := []string{"postgres"}
	base := []string{"fsync=off", "full_page_writes=off", "max_connections=300", "max_prepared_transactions=20"}
	for _, s := range append(base, settings...) {
		cmd = append(cmd, "-c", s)
	}
	// While the image prepares its cluster, no process listens on TCP.
	ready := func(ctx context.Context, c *containerServer) error { return dockerPostgres{c}.ping(ctx) }
	c, err := runContainer(cmp.Or(os.Getenv("TEST_POSTGRES_IMAGE"), "postgres:17-alpine"), ready, map[string]int{postgresPort: port},
		testcontainers.WithEnv(map[string]string{"POSTGRES_PASSWORD": "postgres"}), testcontainers.WithCmd(cmd...))
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	d := dockerPostgres{c}
	if err := hashOnce(ctx, d); err != nil {
		return nil, errors.Join(err, d.stop())
	}
	return d, nil
}

func (d dockerPostgres) url(database string) string {
	u := url.URL{Scheme: "postgres", User: url.UserPassword("postgres", "postgres"), Host: d.addr(postgresPort), Path: "/" + database,
		RawQuery: "sslmode=disable"}
	return u.String()
}

func (d dockerPostgres) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, d.url("postgres"))
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

func (d dockerPostgres) signalBackend(pid int, s syscall.Signal) error {
	_, err := d.exec("kill", "-"+strconv.Itoa(int(s)), strconv.Itoa(pid)) // exit code 1 means that the process has ended
	return err
}

// dockerNATS is a NATS server in a container.
type dockerNATS struct {
	*containerServer
	cfg natsserver.Config
}

// The ports of the image's server, and the directory in the container that is the test's directory.
const (
	natsPort, natsMonitor = "4222/tcp", "8222/tcp"
	natsRoutes            = "6222"
	natsDir               = "/tidings"
)

// startDockerNATS runs the image TEST_NATS_IMAGE. The store is on this machine, and belongs to the
// user of the tests.
func startDockerNATS(cfg natsserver.Config) (natsServer, string, error) {
	monitor, err := pglocal.FreePort()
	if err != nil {
		return nil, "", err
	}
	if cfg.Port, err = fixedPort(cfg.Port); err != nil {
		return nil, "", err
	}
	d := &dockerNATS{cfg: cfg}
	if err := d.configure(); err != nil {
		return nil, "", err
	}
	ready := healthy
	if cfg.Cluster != nil { // it may wait for the other servers
		ready = greets
	}
	d.containerServer, err = runContainer(cmp.Or(os.Getenv("TEST_NATS_IMAGE"), "nats:2"), ready,
		map[string]int{natsPort: cfg.Port, natsMonitor: monitor}, testcontainers.WithCmd("--config", natsDir+"/container.conf"),
		testcontainers.WithConfigModifier(func(c *container.Config) { c.User = fmt.Sprintf("%d:%d", os.Getuid(), os.Getgid()) }),
		testcontainers.WithHostConfigModifier(func(h *container.HostConfig) {
			h.Mounts = append(h.Mounts, mount.Mount{Type: mount.TypeBind, Source: d.dir(), Target: natsDir})
		}))
	if err != nil {
		return nil, "", err
	}
	return d, "nats://" + d.addr(natsPort), nil
}

// dir returns the directory on this machine that the container has as natsDir.
func (d *dockerNATS) dir() string { return filepath.Dir(d.cfg.Dir) }

// configure writes the server's configuration: that of the test, and the addresses of its store,
// its clients and its cluster.
func (d *dockerNATS) configure() error {
	e, err := engine()
	if err != nil {
		return err
	}
	var conf []byte
	if d.cfg.File != "" {
		if conf, err = os.ReadFile(d.cfg.File); err != nil {
			return err
		}
	}
	conf = fmt.Appendf(conf, "\nport: 4222\nhttp_port: 8222\nclient_advertise: %q\n", net.JoinHostPort(e.host, strconv.Itoa(d.cfg.Port)))
	conf = fmt.Appendf(conf, "jetstream { store_dir: %q, max_memory_store: %d", natsDir+"/"+filepath.Base(d.cfg.Dir), 256<<20)
	if d.cfg.MaxStore > 0 {
		conf = fmt.Appendf(conf, ", max_file_store: %d", d.cfg.MaxStore)
	}
	conf = append(conf, " }\n"...)
	if c := d.cfg.Cluster; c != nil { // pings detect a broken route
		conf = fmt.Appendf(conf, "server_name: %q\nserver_tags: [%s]\ncluster { name: tidings, port: %s, no_advertise: true, "+
			"ping_interval: 2s, ping_max: 2, routes: [%s] }\n",
			c.Server, `"`+strings.Join(c.Tags, `", "`)+`"`, natsRoutes, strings.Join(c.Routes, ", "))
	}
	return os.WriteFile(filepath.Join(d.dir(), "container.conf"), conf, 0o600)
}

// reload makes the server read its configuration again, and returns when it has done so.
func (d *dockerNATS) reload() error {
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	before, err := d.loaded(ctx)
	if err != nil {
		return err
	}
	if err := errors.Join(d.configure(), d.signal("HUP")); err != nil {
		return err
	}
	return poll(ctx, func() error {
		if now, err := d.loaded(ctx); err != nil || now != before {
			return err
		}
		return errors.New("the server has not loaded the new configuration")
	})
}

// loaded returns the time at which the server read its configuration.
func (d *dockerNATS) loaded(ctx context.Context) (string, error) {
	var vars struct {
		Loaded string `json:"config_load_time"`
	}
	return vars.Loaded, monitored(ctx, d.containerServer, "/varz", &vars)
}

// healthy returns nil when JetStream has read its store.
func healthy(ctx context.Context, c *containerServer) error {
	return monitored(ctx, c, "/healthz", &struct{}{})
}

func monitored(ctx context.Context, c *containerServer, path string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+c.addr(natsMonitor)+path, nil)
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", path, res.Status)
	}
	return json.NewDecoder(res.Body).Decode(into)
}

// greets returns nil when the server sends its greeting. The engine itself accepts connections
// before that.
func greets(ctx context.Context, c *containerServer) error {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", c.addr(natsPort))
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	_, err = bufio.NewReader(conn).ReadString('\n')
	return err
}
