package event

// Ref names an entity at one of its versions: an edge, a child, or the settings of a thread. Its JSON is short,
// because it travels in headers.
type Ref struct {
	Type    string `json:"k"`           // the aggregate type that its events are of
	From    ID     `json:"a,omitempty"` // of an edge
	To      ID     `json:"b,omitempty"`
	Child   string `json:"c,omitempty"` // its id
	Thread  ID     `json:"t,omitempty"` // the object whose children settings are for
	Kind    string `json:"n,omitempty"` // and the kind of those; comments when absent
	Version int64  `json:"v"`
}

// Ref names the pair as it is.
func (f Follow) Ref() Ref {
	return Ref{Type: AggregateFollow, From: f.FollowerID, To: f.FolloweeID, Version: f.Version}
}

// Ref names the edge of this kind as it is.
func (e Edge) Ref(kind string) Ref {
	return Ref{Type: kind, From: e.From, To: e.To, Version: e.Version}
}

// Ref names the comment as it is.
func (c Comment) Ref() Ref {
	return Ref{Type: AggregateComment, Child: c.CommentID, Version: c.Version}
}

// Ref names the child of this kind as it is.
func (c Child) Ref(kind string) Ref { return Ref{Type: kind, Child: c.ID, Version: c.Version} }

// Ref names the settings as they are.
func (t Thread) Ref() Ref {
	return Ref{Type: AggregateThread, Thread: t.PostID, Kind: t.Kind, Version: t.Version}
}
