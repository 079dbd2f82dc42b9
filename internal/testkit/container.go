package testkit

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
)

// ownerLabel is the label of the tests' containers and networks. Its value identifies the process
// that created them (see owner).
const ownerLabel = "tidings.testkit.owner"

// engineTimeout limits one operation of the engine on a container, on a busy machine.
const engineTimeout = time.Minute

// containerServer is a server in its own container. It can end and start again with the same files
// and ports.
type containerServer struct {
	ctr   *testcontainers.DockerContainer
	id    string
	host  string         // where its ports are reachable
	ports map[string]int // port in the container -> port on the host
	ready readiness
}

// readiness returns nil when the server of a container serves.
type readiness func(ctx context.Context, c *containerServer) error

// engine returns the container engine. It first removes the containers that killed test binaries
// left there.
var engine = sync.OnceValues(func() (e struct {
	*testcontainers.DockerClient
	host string     // where this process reaches the ports of containers
	bind netip.Addr // the host's address to which the ports are bound
}, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	if e.host, e.bind, err = hostAddress(ctx); err != nil {
		return e, err
	}
	if e.DockerClient, err = testcontainers.NewDockerClientWithOpts(ctx); err != nil {
		return e, err
	}
	return e, removeContainers(ctx, e.DockerClient.Client, orphaned)
})

// hostAddress returns the address at which this process reaches the engine's containers, and the
// address to bind their ports to. Usually both are loopback. For a process in a container beside
// them, both are the gateway of the engine's network. So other machines do not reach the ports. For
// an engine that is known only by name, ports are bound to every address.
// TESTCONTAINERS_HOST_OVERRIDE names the host.
func hostAddress(ctx context.Context) (host string, bind netip.Addr, err error) {
	// Without the option the provider creates its own network.
	provider, err := testcontainers.NewDockerProvider(testcontainers.WithDefaultBridgeNetwork(testcontainers.Bridge))
	if err != nil {
		return "", bind, fmt.Errorf("reach Docker: %w", err)
	}
	host, err = provider.DaemonHost(ctx)
	if err := errors.Join(err, provider.Close()); err != nil {
		return "", bind, fmt.Errorf("reach Docker: %w", err)
	}
	ours, err := net.InterfaceAddrs()
	if err != nil {
		return "", bind, err
	}
	// A container may have its own engine: the gateway is then an address of this machine.
	if host == "localhost" || slices.ContainsFunc(ours, func(a net.Addr) bool { return strings.HasPrefix(a.String(), host+"/") }) {
		host = "127.0.0.1"
	}
	if bind, err = netip.ParseAddr(host); err != nil {
		bind = netip.IPv4Unspecified()
	}
	return host, bind, nil
}

// runContainer runs an image, publishes the ports (by their names in the container), and returns
// when its server is ready. The ports on the host are fixed, because an engine would choose other
// ports at each start of the container. The caller stops the server.
func runContainer(image string, ready readiness, ports map[string]int,
	opts ...testcontainers.ContainerCustomizer) (*containerServer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	e, err := engine()
	if err != nil {
		return nil, err
	}
	if err := reapContainers(); err != nil {
		return nil, err
	}
	c, bindings := &containerServer{host: e.host, ports: ports, ready: ready}, network.PortMap{}
	for port, onHost := range ports {
		bindings[network.MustParsePort(port)] = []network.PortBinding{{HostIP: e.bind, HostPort: strconv.Itoa(onHost)}}
	}
	// Without WithExposedPorts it would publish every port that the image names, on every address.
	c.ctr, err = testcontainers.Run(ctx, image, append(opts, testcontainers.WithExposedPorts(slices.Collect(maps.Keys(ports))...),
		testcontainers.WithLabels(map[string]string{ownerLabel: owner()}),
		testcontainers.WithHostConfigModifier(func(h *container.HostConfig) { h.PortBindings = bindings }))...)
	if err != nil {
		if c.ctr != nil {
			err = errors.Join(err, testcontainers.TerminateContainer(c.ctr))
		}
		return nil, fmt.Errorf("run %s in Docker: %w", image, err)
	}
	c.id = c.ctr.GetContainerID()
	if err := c.awaitReady(ctx); err != nil {
		return nil, errors.Join(err, c.stop())
	}
	return c, nil
}

// addr returns the address at which clients reach a port of the container.
func (c *containerServer) addr(port string) string {
	return net.JoinHostPort(c.host, strconv.Itoa(c.ports[port]))
}

func (c *containerServer) awaitReady(ctx context.Context) error {
	if err := poll(ctx, func() error { return c.ready(ctx, c) }); err != nil {
		return fmt.Errorf("wait for the server in container %.12s: %w", c.id, err)
	}
	return nil
}

// poll calls try until it returns nil. When ctx ends, poll returns the last error of try.
func poll(ctx context.Context, try func() error) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-tick.C:
		}
	}
}

// ask runs an operation of the engine on the container, with a time limit.
func (c *containerServer) ask(do func(ctx context.Context, e *client.Client) error) error {
	e, err := engine()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	return do(ctx, e.Client)
}

func (c *containerServer) state() (s container.State, err error) {
	err = c.ask(func(ctx context.Context, e *client.Client) error {
		got, err := e.ContainerInspect(ctx, c.id, client.ContainerInspectOptions{})
		if err == nil {
			s = *got.Container.State
		}
		return err
	})
	return s, err
}

func (c *containerServer) stop() error {
	return c.ask(func(ctx context.Context, e *client.Client) error { return removeContainer(ctx, e, c.id) })
}

func (c *containerServer) ended() bool {
	s, err := c.state()
	return err == nil && !s.Running
}

// kill sends SIGKILL to every process of the container, also if it is frozen, and returns when they
// have ended.
func (c *containerServer) kill() error {
	if c.ended() {
		return nil
	}
	return c.ask(func(ctx context.Context, e *client.Client) error {
		if err := c.signal("KILL"); err != nil {
			return err
		}
		wait := e.ContainerWait(ctx, c.id, client.ContainerWaitOptions{Condition: container.WaitConditionNotRunning})
		select {
		case err := <-wait.Error:
			return err
		case <-wait.Result:
			return nil
		}
	})
}

// freeze pauses the container. On a busy machine the engine may give up before all threads have
// stopped (cgroups v1). So freeze retries.
func (c *containerServer) freeze() error {
	if c.ended() {
		return errors.New("the container has ended")
	}
	return c.ask(func(ctx context.Context, e *client.Client) error {
		return poll(ctx, func() error {
			_, err := e.ContainerPause(ctx, c.id, client.ContainerPauseOptions{})
			return err
		})
	})
}

func (c *containerServer) thaw() error {
	if s, err := c.state(); err != nil || !s.Paused {
		return err
	}
	return c.ask(func(ctx context.Context, e *client.Client) error {
		_, err := e.ContainerUnpause(ctx, c.id, client.ContainerUnpauseOptions{})
		return err
	})
}

func (c *containerServer) restart(ctx context.Context) error {
	if err := c.kill(); err != nil {
		return err
	}
	if err := c.ask(func(ctx context.Context, e *client.Client) error {
		_, err := e.ContainerStart(ctx, c.id, client.ContainerStartOptions{})
		return err
	}); err != nil {
		return err
	}
	return c.awaitReady(ctx)
}

// exec runs a command in the container and returns its exit code.
func (c *containerServer) exec(cmd ...string) (code int, err error) {
	err = c.ask(func(ctx context.Context, _ *client.Client) error {
		code, _, err = c.ctr.Exec(ctx, cmd)
		return err
	})
	return code, err
}

// signal sends a signal to the container's first process.
func (c *containerServer) signal(s string) error {
	return c.ask(func(ctx context.Context, e *client.Client) error {
		_, err := e.ContainerKill(ctx, c.id, client.ContainerKillOptions{Signal: s})
		return err
	})
}

// join connects the container to a network, in which other containers find it by this name.
func (c *containerServer) join(id, name string) error {
	return c.ask(func(ctx context.Context, e *client.Client) error {
		_, err := e.NetworkConnect(ctx, id, client.NetworkConnectOptions{Container: c.id,
			EndpointConfig: &network.EndpointSettings{Aliases: []string{name}}})
		return err
	})
}

// leave disconnects the container from a network: the packets that it sends there are lost.
func (c *containerServer) leave(id string) error {
	return c.ask(func(ctx context.Context, e *client.Client) error {
		_, err := e.NetworkDisconnect(ctx, id, client.NetworkDisconnectOptions{Container: c.id})
		return err
	})
}

// owner identifies this process. Because its id is reused some day, it adds the boot, the namespace
// of the id and the start time.
func owner() string { return ownerOf(os.Getpid()) }

func ownerOf(pid int) string {
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // if it cannot be read, it is empty for every process
	space, _ := os.Readlink("/proc/self/ns/pid")
	return strings.Join([]string{strings.TrimSpace(string(boot)), space, strconv.Itoa(pid), started(pid)}, " ")
}

// orphaned reports whether the owner was a process of this machine, in this namespace, that has
// ended.
func orphaned(of string) bool {
	f := strings.Split(of, " ")
	if len(f) != 4 {
		return false
	}
	pid, err := strconv.Atoi(f[2])
	now := strings.Split(ownerOf(pid), " ")
	return err == nil && f[0] != "" && f[0] == now[0] && f[1] == now[1] && f[3] != now[3]
}

// makeNetwork creates a network without access to other networks, and returns its id.
func makeNetwork() (id string, err error) {
	e, err := engine()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	made, err := e.NetworkCreate(ctx, "tidings-test-"+rand.Text(),
		client.NetworkCreateOptions{Internal: true, Labels: map[string]string{ownerLabel: owner()}})
	return made.ID, err
}

func dropNetwork(id string) error {
	e, err := engine()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), engineTimeout)
	defer cancel()
	return removeNetwork(ctx, e.Client, id)
}

// removeContainers removes the containers and networks whose owner of accepts.
func removeContainers(ctx context.Context, e *client.Client, of func(owner string) bool) error {
	ours := client.Filters{}.Add("label", ownerLabel)
	containers, err := e.ContainerList(ctx, client.ContainerListOptions{All: true, Filters: ours})
	if err != nil {
		return fmt.Errorf("list the containers of killed tests: %w", err)
	}
	var errs []error
	for _, c := range containers.Items {
		if of(c.Labels[ownerLabel]) {
			errs = append(errs, removeContainer(ctx, e, c.ID))
		}
	}
	networks, err := e.NetworkList(ctx, client.NetworkListOptions{Filters: ours})
	errs = append(errs, err)
	for _, n := range networks.Items {
		if of(n.Labels[ownerLabel]) {
			errs = append(errs, removeNetwork(ctx, e, n.ID))
		}
	}
	return errors.Join(errs...)
}

// removeContainer removes a container, running or frozen, with its volumes.
func removeContainer(ctx context.Context, e *client.Client, id string) error {
	_, err := e.ContainerRemove(ctx, id, client.ContainerRemoveOptions{RemoveVolumes: true, Force: true})
	return unlessGone(err)
}

func removeNetwork(ctx context.Context, e *client.Client, id string) error {
	_, err := e.NetworkRemove(ctx, id, client.NetworkRemoveOptions{})
	return unlessGone(err)
}

// unlessGone returns nil if another process has removed the object, or is removing it.
func unlessGone(err error) error {
	if errdefs.IsNotFound(err) || errdefs.IsConflict(err) {
		return nil
	}
	return err
}
