package testkit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	tcnats "github.com/testcontainers/testcontainers-go/modules/nats"
	tcpostgres "github.com/testcontainers/testcontainers-go/modules/postgres"

	"github.com/tidings/tidings/internal/pglocal"
)

// docker is a PostgreSQL in a container of its own.
type docker struct {
	ctr    *tcpostgres.PostgresContainer
	engine *testcontainers.DockerClient
	base   url.URL
	state  string // running, frozen or killed
}

// startContainer runs the image TEST_POSTGRES_IMAGE. The port on the host is fixed, because a port that the engine chooses
// changes with each start of the container.
func startContainer(settings ...string) (_ server, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	port, err := pglocal.FreePort()
	if err != nil {
		return nil, err
	}
	host, bind, err := hostAddress(ctx)
	if err != nil {
		return nil, err
	}
	cmd := []string{"postgres"}
	for _, s := range append([]string{"fsync=off", "full_page_writes=off", "max_connections=300", "max_prepared_transactions=20"}, settings...) {
		cmd = append(cmd, "-c", s)
	}
	ctr, err := tcpostgres.Run(ctx, cmp.Or(os.Getenv("TEST_POSTGRES_IMAGE"), "postgres:17-alpine"), testcontainers.WithCmd(cmd...),
		testcontainers.WithHostConfigModifier(func(h *container.HostConfig) {
			h.PortBindings = network.PortMap{network.MustParsePort("5432/tcp"): {{HostIP: bind, HostPort: strconv.Itoa(port)}}}
		}))
	if err != nil {
		if ctr != nil {
			err = errors.Join(err, testcontainers.TerminateContainer(ctr))
		}
		return nil, fmt.Errorf("run PostgreSQL in Docker: %w", err)
	}
	d := &docker{ctr: ctr, state: "running"}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.stop())
		}
	}()
	// Not ctr.ConnectionString: it may name the gateway of another of the engine's networks, where the port is not bound.
	d.base = url.URL{Scheme: "postgres", User: url.UserPassword("postgres", "postgres"), Host: net.JoinHostPort(host, strconv.Itoa(port)),
		RawQuery: "sslmode=disable"}
	if d.engine, err = testcontainers.NewDockerClientWithOpts(ctx); err != nil {
		return nil, err
	}
	return d, d.awaitReady(ctx)
}

// hostAddress is by what this process reaches the engine's containers, and the address to bind their ports to, so that they are
// open to nobody else: loopback, or, when this process is in a container itself, the gateway of the engine's network. An engine
// that is known by name alone binds to every address.
func hostAddress(ctx context.Context) (host string, bind netip.Addr, err error) {
	provider, err := testcontainers.NewDockerProvider()
	if err != nil {
		return "", bind, fmt.Errorf("reach Docker: %w", err)
	}
	host, err = provider.DaemonHost(ctx)
	if err := errors.Join(err, provider.Close()); err != nil {
		return "", bind, fmt.Errorf("reach Docker: %w", err)
	}
	if host == "localhost" {
		host = "127.0.0.1"
	}
	if bind, err = netip.ParseAddr(host); err != nil {
		bind = netip.IPv4Unspecified()
	}
	return host, bind, nil
}

// awaitReady connects until it succeeds: while the image prepares its cluster nothing listens on TCP.
func (d *docker) awaitReady(ctx context.Context) error {
	for {
		err := d.ping(ctx)
		if err == nil {
			return nil
		}
		t := time.NewTimer(50 * time.Millisecond)
		select {
		case <-ctx.Done():
			t.Stop()
			return fmt.Errorf("wait for PostgreSQL in Docker: %w", err)
		case <-t.C:
		}
	}
}

func (d *docker) ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, d.url("postgres"))
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

func (d *docker) url(database string) string {
	u := d.base
	u.Path = "/" + database
	return u.String()
}

func (d *docker) stop() error {
	err := d.thaw()
	if d.engine != nil {
		err = errors.Join(err, d.engine.Close())
	}
	return errors.Join(err, testcontainers.TerminateContainer(d.ctr, testcontainers.StopTimeout(0)))
}

func (d *docker) ended() bool { return d.state == "killed" }

func (d *docker) kill() error {
	if d.state == "killed" {
		return nil
	}
	if err := d.thaw(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	none := time.Duration(0) // SIGKILL at once, for every process of the container
	if err := d.ctr.Stop(ctx, &none); err != nil {
		return err
	}
	d.state = "killed"
	return nil
}

func (d *docker) freeze() error {
	if d.state != "running" {
		return fmt.Errorf("the container is %s", d.state)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := d.engine.ContainerPause(ctx, d.ctr.GetContainerID(), client.ContainerPauseOptions{}); err != nil {
		return err
	}
	d.state = "frozen"
	return nil
}

func (d *docker) thaw() error {
	if d.state != "frozen" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if _, err := d.engine.ContainerUnpause(ctx, d.ctr.GetContainerID(), client.ContainerUnpauseOptions{}); err != nil {
		return err
	}
	d.state = "running"
	return nil
}

func (d *docker) restart(ctx context.Context) error {
	if err := d.kill(); err != nil {
		return err
	}
	if err := d.ctr.Start(ctx); err != nil {
		return err
	}
	d.state = "running"
	return d.awaitReady(ctx)
}

func (d *docker) killBackend(pid int) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, _, err := d.ctr.Exec(ctx, []string{"kill", "-KILL", strconv.Itoa(pid)}) // an exit code of 1: it has gone
	return err
}

// containerNATS runs the image TEST_NATS_IMAGE for one test.
func containerNATS(t testing.TB) *Broker {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	ctr, err := tcnats.Run(ctx, cmp.Or(os.Getenv("TEST_NATS_IMAGE"), "nats:2"))
	testcontainers.CleanupContainer(t, ctr)
	if err != nil {
		t.Fatalf("run NATS in Docker: %v", err)
	}
	u, err := ctr.ConnectionString(ctx)
	if err != nil {
		t.Fatal(err)
	}
	b := &Broker{}
	b.setURL(u)
	return b
}
