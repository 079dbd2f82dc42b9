package testkit

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/moby/moby/client"
)

// TestContainersAreOpenToThisMachineAlone checks all published ports, also after a restart.
func TestContainersAreOpenToThisMachineAlone(t *testing.T) {
	if !forceDocker() {
		t.Log("the servers of this run are no containers")
		return
	}
	e, err := engine()
	if err != nil {
		t.Fatal(err)
	}
	if !e.bind.IsLoopback() && !e.bind.IsPrivate() {
		t.Errorf("ports are bound to %s", e.bind)
	}
	b, pg := NATSProcess(t), PostgresProcess(t)
	for c, want := range map[*containerServer]int{b.s.(*dockerNATS).containerServer: 2, pg.s.(dockerPostgres).containerServer: 1} {
		got, err := e.ContainerInspect(t.Context(), c.id, client.ContainerInspectOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if n := len(got.Container.HostConfig.PortBindings); n != want {
			t.Errorf("%s: %d ports are published, want %d", got.Container.Config.Image, n, want)
		}
		for port, bindings := range got.Container.HostConfig.PortBindings {
			if len(bindings) != 1 || bindings[0].HostIP != e.bind {
				t.Errorf("%s: port %s is bound to %v, want %s", got.Container.Config.Image, port, bindings, e.bind)
			}
		}
	}
}

// killed runs this test binary again as a child. The child starts servers in containers, does what
// how names, and kills itself. killed returns the owner of the containers.
func killed(t *testing.T, test, how string) (owner string) {
	t.Helper()
	out := filepath.Join(t.TempDir(), "owner")
	cmd := exec.Command(os.Args[0], "-test.run=^"+test+"$")
	cmd.Env = append(os.Environ(), "TESTKIT_KILLED_CONTAINERS="+how, "TESTKIT_KILLED_OUT="+out)
	said, err := cmd.CombinedOutput()
	if cmd.ProcessState.ExitCode() != -1 {
		t.Fatalf("the child was not killed: %v\n%s", err, said)
	}
	b, err := os.ReadFile(out)
	if err != nil || len(b) == 0 {
		t.Fatalf("the child started no servers: %v", err)
	}
	return string(b)
}

// TestFaultKilledTestBinaryLeavesNoContainer: the binary's reaper removes its containers. If the
// reaper is killed too, the next binary does.
func TestFaultKilledTestBinaryLeavesNoContainer(t *testing.T) {
	if !forceDocker() {
		t.Log("the servers of this run are no containers")
		return
	}
	if how := os.Getenv("TESTKIT_KILLED_CONTAINERS"); how != "" {
		b, _ := NATSProcess(t), NATSCluster(t, 3)
		b.Freeze(t)
		if how == "with its reaper" {
			check(t, "kill the reaper", shared.reaper.Process.Kill())
		}
		check(t, "say who has them", os.WriteFile(os.Getenv("TESTKIT_KILLED_OUT"), []byte(owner()), 0o600))
		check(t, "kill myself", syscall.Kill(os.Getpid(), syscall.SIGKILL))
		select {}
	}
	e, err := engine()
	if err != nil {
		t.Fatal(err)
	}
	left := func(owner string) (containers, networks int) {
		of := client.Filters{}.Add("label", ownerLabel+"="+owner)
		cs, err := e.ContainerList(t.Context(), client.ContainerListOptions{All: true, Filters: of})
		check(t, "list containers", err)
		ns, err := e.NetworkList(t.Context(), client.NetworkListOptions{Filters: of})
		check(t, "list networks", err)
		return len(cs.Items), len(ns.Items)
	}
	alone := killed(t, t.Name(), "alone")
	Eventually(t, "the reaper removes the containers and the network", func() (bool, error) {
		containers, networks := left(alone)
		return containers == 0 && networks == 0, nil
	})
	both := killed(t, t.Name(), "with its reaper")
	if containers, networks := left(both); containers != 4 || networks != 1 {
		t.Fatalf("%d containers and %d networks remain, want 4 and 1", containers, networks)
	}
	mine := NATSProcess(t)
	check(t, "remove what is left", removeContainers(t.Context(), e.Client, orphaned))
	if containers, networks := left(both); containers != 0 || networks != 0 {
		t.Errorf("%d containers and %d networks of an ended process remain", containers, networks)
	}
	if mine.s.(*dockerNATS).ended() {
		t.Error("a container of a running process was removed")
	}
}

func TestOnlyWhatABygoneProcessOfThisMachineOwnedIsOrphaned(t *testing.T) {
	mine := owner()
	f := strings.Split(mine, " ")
	if len(f) != 4 || f[0] == "" || f[3] == "" {
		t.Fatalf("the owner is %q", mine)
	}
	gone := exec.Command("true")
	if err := gone.Run(); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]struct {
		owner string
		want  bool
	}{
		"this process":                          {mine, false},
		"an earlier process with the same id":   {f[0] + " " + f[1] + " " + f[2] + " 1", true},
		"a process that has ended":              {strings.TrimSuffix(ownerOf(gone.Process.Pid), " ") + " 77", true},
		"the same id in another container":      {f[0] + " pid:[1] " + f[2] + " 1", false},
		"the same id before the machine booted": {"another " + f[1] + " " + f[2] + " 1", false},
		"somebody else's label":                 {"x", false},
	} {
		if got := orphaned(c.owner); got != c.want {
			t.Errorf("%s, %q: orphaned %t, want %t", what, c.owner, got, c.want)
		}
	}
}
