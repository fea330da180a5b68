"""Word lists the sandbox's names and texts are drawn from."""

# ruff: noqa: SIM905 (lists of plain words read best as plain words)

FIRST_NAMES = (
    "Aaron Bella Carmen Derek Elena Felix Grace Hugo Irene Jonas Karla Leon Maria Nolan Olivia Peter Quinn Rosa Simon "
    "Tessa Ursula Victor Wendy Xavier Yara Zane Amber Boris Celia Dylan"
).split()
LAST_NAMES = (
    "Adams Baker Carter Diaz Evans Foster Garcia Hughes Ingram Jensen Keller Lopez Morgan Novak Owens Parker Reyes "
    "Sanders Turner Vargas Walker Young Ziegler"
).split()
DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
ALARM_LABELS = ["Wake up", "Gym", "Medicine", "Walk the dog", "Standup", "Lunch", "Study", "Call home"]
ARTIST_FIRST = "Crimson Velvet Silver Hollow Electric Northern Wild Quiet Golden Paper".split()
ARTIST_LAST = "Foxes Harbor Engine Choir Parade Ravens Theory Orchard Signal Mirrors".split()
GENRES = ["rock", "pop", "jazz", "indie", "classical", "folk", "hip-hop", "electronic"]
ADJECTIVES = (
    "Broken Distant Endless Faded Gentle Hidden Last Lonely Midnight Neon Open Perfect Quiet Restless Secret Sleepless "
    "Slow Tender Wandering Winter"
).split()
NOUNS = (
    "Avenue Bridges Candle Daylight Echoes Fires Garden Horizon Island Journey Kingdom Letters Mountain Nights Ocean "
    "Promise River Shadows Thunder Window"
).split()
PLAYLIST_TITLES = [
    "Morning Run",
    "Deep Focus",
    "Road Trip",
    "Rainy Day",
    "Dinner Party",
    "Gym Boost",
    "Late Night Drive",
    "Sunday Chill",
    "Study Session",
    "Summer Vibes",
    "Throwback Mix",
    "Coffee Break",
    "Beach Days",
    "Winter Evenings",
    "Garage Jams",
    "Piano Moods",
]
PAYMENT_REASONS = [
    "Dinner",
    "Groceries",
    "Concert tickets",
    "Rent",
    "Utilities",
    "Taxi ride",
    "Coffee",
    "Birthday gift",
    "Movie night",
    "Gas money",
]
NOTE_TOPICS = "Garden Kitchen Travel Budget Fitness Reading Birthday Project Car Apartment".split()
NOTE_KINDS = "ideas checklist plan log reminders".split()
NOTE_TAGS = ["home", "travel", "work", "health", "finance", "hobby"]
SENTENCES = [
    "Compare prices before deciding.",
    "Ask for a second opinion.",
    "Remember to take pictures.",
    "Keep the receipts.",
    "Start early in the morning.",
    "Check the weather first.",
    "Make a copy of the documents.",
    "Call to confirm the date.",
]
MESSAGES = [
    "Dinner is at eight tonight.",
    "I will be ten minutes late.",
    "Happy new month to you!",
    "Please call me back today.",
    "The meeting has moved to noon.",
    "I have changed my address.",
    "Game night is on Friday.",
    "Thanks for your help last week.",
]
NEW_TITLES = [
    "Best Of Mine",
    "Favorites Mix",
    "Top Picks",
    "Heart Songs",
    "All Time Loves",
    "My Collection",
    "Keepers",
    "Golden Hour",
]
PROJECT_NAMES = [
    "House Renovation",
    "Wedding Planning",
    "Job Search",
    "Language Course",
    "Spring Cleaning",
    "Book Club",
    "Marathon Training",
    "Vegetable Garden",
    "Photo Archive",
    "Car Maintenance",
    "Family Reunion",
    "Tax Return",
    "Science Fair",
    "Charity Event",
]
COLORS = ["charcoal", "red", "blue", "green", "orange", "yellow"]
TASK_VERBS = "Review Prepare Order Schedule Update Collect".split()
TASK_OBJECTS = "documents supplies tickets estimates invitations materials".split()
FOLDERS = ["documents", "downloads"]
EXTENSIONS = ["txt", "pdf", "tmp", "log", "csv"]
FILE_STEMS = (
    "agenda budget contract draft export forecast guide history invoice journal ledger manual notes outline photo "
    "quote report schedule summary ticket"
).split()
SUBJECTS = ["Weekend plans", "Quick question", "Following up", "Invoice", "Photos", "Invitation", "News", "Reminder"]
SELLERS = ["Bright Goods", "Casa Market", "Delta Supply", "Evergreen Shop", "Fine Things", "Metro Outlet"]
PRODUCT_STYLES = "Classic Compact Deluxe Eco Foldable Portable Premium Rustic".split()
PRODUCT_TYPES = "Backpack Blender Chair Headphones Kettle Lamp Mug Notebook Tent Watch".split()
